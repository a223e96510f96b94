// Values that only choose: distances of which argmin takes the nearest, scores that topk takes indices of.
#pragma once

#include "plumb/graph/graph.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/state.h"

namespace plumb {

constexpr const char* kOnlyChooses = "it only chooses: nothing that the model returns has its values";

// Returns the nodes whose values reach nothing that the graph returns or writes, and no operator with a weight, except
// through what is no floating-point number: an index, a comparison. No gradient comes back to them, and a factor would
// only change the choice. Empty if the graph returns choices alone, as a model may that gives its classes when it does
// not train: its values must keep the factors that they have in training.
NodeSet nodes_that_only_choose(const Graph& graph, const State& state);

}  // namespace plumb
