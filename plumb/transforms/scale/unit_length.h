// Vectors of length 1: cosines, keys that are normalized, demodulated filters.
#pragma once

#include "plumb/graph/graph.h"

namespace plumb {

// Returns whether an operand of a product, or the filter of a convolution, has length 1 over as many elements as the
// product sums over: x / |x|, or x times the reciprocal root of the sum of its squares. The result then has the scale
// of the other operand; with two such operands it is a cosine. False for a product with a parameter, whose scale is
// chosen.
bool sums_over_unit_length(const Node* product);

}  // namespace plumb
