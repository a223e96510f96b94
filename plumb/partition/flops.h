// Floating point operations of one call, from the sizes of its arguments and results.
#pragma once

#include <unordered_map>

#include "plumb/graph/graph.h"

namespace plumb {

using ValueMetas = std::unordered_map<const Value*, TensorMeta>;

// Returns the forward's floating-point operations; a multiply and an add count as two. Contractions and recurrent
// layers (as in the table of operator facts) count their products, everything else one for each element of its results,
// lookups nothing. A value without meta counts as empty.
double flops_of(const Node& node, const ValueMetas& metas);

}  // namespace plumb
