// A stage as bytes: to send it to the rank that runs it, so that one rank at most ever holds the whole model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/partition/stage_io.h"

namespace plumb {

class Pipe;

struct StagePackage {
  int index = 0;
  std::shared_ptr<GraphModule> module;
  PipeTable table;                       // table of all stages, not only this one
  std::vector<std::string> input_names;  // names of the whole graph's inputs
  TreeSpec in_spec, out_spec;            // structures of the whole graph's inputs and outputs
};

// Graph with metadata, state (names, kinds, ties, tags, gradients' wanting; not the gradients) and the table. Tensors
// on other devices than the CPU come back on the CPU. Throws Error(InvalidArgument) for what has no tensor and
// Error(Unsupported) for a tensor without a dense layout.
std::string serialize_stage(const Pipe& pipe, int index);

// Throws Error(BadFile) that says what is wrong; the bytes are untrusted.
StagePackage deserialize_stage(std::string_view bytes);

}  // namespace plumb
