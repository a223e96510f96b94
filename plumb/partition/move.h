// A graph made on one device, rewritten to run on another.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

// Rewrites device arguments of operators that make or move tensors, and the devices in the values' metadata, nested
// graphs too. The caller moves the state: see Pipe::move_stage, which does both. Returns the names of nodes whose
// device arguments changed.
std::vector<std::string> rewrite_devices(Graph& graph, at::Device device);

}  // namespace plumb
