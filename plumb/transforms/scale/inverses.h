// Inverses of matrices, and what a forward computes with them.
#pragma once

#include "plumb/graph/graph.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/state.h"

namespace plumb {

// Returns why a sum is part of an inverse that a forward computes by hand; null if it is none. With a factor it is no
// inverse.
const char* part_of_inverse(const Node* add);

constexpr const char* kWithInverse = "it computes with an inverse, and a factor would change what cancels";

// Returns inverses, of operators and by hand, and nodes that depend on one with no parameter in between: the recurrence
// of a gated delta rule, which takes off from its state what is there already (arXiv 2412.06464, section 3.3).
NodeSet computed_with_inverse(const Graph& graph, const State& state);

}  // namespace plumb
