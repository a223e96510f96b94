// Computes once what is computed twice: nodes with equal operator, arguments and grad flag become one, if nothing
// writes their inputs' memory in between or their results' memory afterwards. So do two reads of one parameter or
// buffer.
//
// Left alone: random draws, uninitialized memory, two values that are both returned (the caller could tell them apart),
// and values that may carry gradients: merged, their gradients would be summed before instead of after the operator's
// backward, which rounds differently. `differentiable` merges those too.
#pragma once

#include "plumb/graph/graph_module.h"

namespace plumb {

struct CommonSubexpressionsOptions {
  bool differentiable = false;
};

// Returns whether anything changed.
bool common_subexpressions(Graph& graph, const State* state = nullptr, const CommonSubexpressionsOptions& options = {});

}  // namespace plumb
