// The training mode that a graph was made in: its operators hold it as arguments, so a graph cannot change it.
#pragma once

#include "plumb/graph/graph.h"

namespace plumb {

// For a graph of unknown origin: false if all operators that know a mode are in evaluation. Dropout inside attention
// has a probability alone and says nothing.
bool made_in_training(const Graph& graph);

// Returns whether an operator (dropout, batch norm) computes something else in the mode that the graph was not made in.
// Attention without dropout does only if the graph was made in evaluation.
bool depends_on_mode(const Graph& graph, bool made_in_training);

}  // namespace plumb
