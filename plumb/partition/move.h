// A graph made on one device, rewritten to run on another.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

class GraphModule;

// Rewrites device arguments of operators that make or move tensors, and the devices in the values' metadata, nested
// graphs too. The caller moves the state. Returns the names of nodes whose device arguments changed.
std::vector<std::string> rewrite_devices(Graph& graph, at::Device device);

// Moves a module: its graph by rewrite_devices(), and its state, where tied tensors stay tied and tags are kept. What
// comes from the meta device gets memory to load weights into. Throws Error(ExecutionFailed) that begins with `what`.
void move_module(GraphModule& module, at::Device device, const std::string& what);

}  // namespace plumb
