// Computes nodes once, now, if their results are the same in every run: their inputs are constants of the state (not
// parameters or buffers), or they have none (`arange`, `full`). A result that the graph still reads becomes a Constant
// of the state, or the number itself. C++'s `torch::tensor({1, 2, 3})`, an `empty` filled one element at a time,
// becomes one Constant; so does any memory that is written with constants only, and read only after its last write.
//
// The values are those of a run, bit for bit: the nodes are run. Left alone: what is random, uninitialized, written by
// anything else, returned (the caller might write it), asked for its gradient, on the meta device, larger than the
// limit, or of unknown type.
#pragma once

#include "plumb/graph/graph_module.h"

namespace plumb {

struct ConstantFoldingOptions {
  int64_t limit_bytes = 1 << 20;  // size limit of each computed tensor, intermediate ones included
};

// Returns whether anything changed. Folded tensors are added to the state as "folded_NAME".
bool constant_folding(Graph& graph, State& state, const ConstantFoldingOptions& options = {});

}  // namespace plumb
