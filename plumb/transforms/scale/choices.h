// Values that mean what they are: distances of which argmin takes the nearest, scores that topk takes indices of,
// exponents, logarithms.
#pragma once

#include "plumb/graph/graph.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/state.h"

namespace plumb {

constexpr const char* kOnlyChooses = "it only chooses: nothing that the model returns has its values";
constexpr const char* kIsExponent = "its sum is an exponent or a logarithm, where a factor would be a power";

// Returns the nodes whose values reach nothing that the graph returns or writes, and no operator with a weight, except
// through what is no floating-point number: an index, a comparison. No gradient comes back to them, and a factor would
// only change the choice. Empty if the graph returns choices alone, as a model may that gives its classes when it does
// not train: its values must keep the factors that they have in training.
// `differentiable`: the nodes that a gradient can flow through.
NodeSet nodes_that_only_choose(const Graph& graph, const State& state, const NodeSet& differentiable);

// Returns the nodes whose values are terms of exponents or of logarithms, as the graph's operators read them: decays
// and scans in the space of logarithms, the score of a path beside the logarithm of all paths' sum (CRF), logarithms of
// determinants (flows). A factor would be a power there. `differentiable`: as above.
NodeSet nodes_of_exponents(const Graph& graph, const NodeSet& differentiable);

}  // namespace plumb
