// Einsums that are matrix products, spelled as such.
#pragma once

#include "plumb/graph/graph.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/state.h"

namespace plumb {

// Replaces einsums of two tensors by aten::matmul between permutations, so that they are scaled as the same products
// written with `@`: those that sum over dimensions of both operands, each of which carries a gradient. What has none,
// or was multiplied by such, is a table, a mask or a choice of rows, whose product has the other operand's scale.
// Einsums in `keep` stay, and those of free sizes whose dimensions would have to be joined. Returns whether there were
// any.
bool spell_einsums_as_products(Graph& graph, const State& state, const NodeSet& keep);

}  // namespace plumb
