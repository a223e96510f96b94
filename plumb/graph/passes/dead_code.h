// Erases nodes without effect: nodes whose results lead to no output, and writes into memory that nothing reads later.
//
// Stays: a write to an input, parameter or buffer; a write that a live node reads through any view; random draws
// (erasing one would shift the stream of random numbers of all that follow), unless `remove_random`; operators without
// results, communication. Inputs stay, and entries of the state (their names are the user's).
#pragma once

#include "plumb/graph/graph_module.h"

namespace plumb {

struct DeadCodeOptions {
  bool remove_random = false;
};

// Returns whether anything was erased.
bool dead_code(GraphModule& module, const DeadCodeOptions& options = {});
// Does so in one graph. Without the state, names are taken for different tensors.
bool dead_code(Graph& graph, const State* state = nullptr, const DeadCodeOptions& options = {});

}  // namespace plumb
