// Operands of products that are normalized. Vectors of length 1: cosines, keys, demodulated filters. Shares, which sum
// to 1: means, streams that are mixed.
#pragma once

#include <optional>
#include <string>

#include "plumb/graph/graph.h"

namespace plumb {

struct NormalizedOperand {
  std::string why;         // the product has no factor
  Value* mixed = nullptr;  // shares: what the result is a mean of
};

// Returns the operand of a product, or the filter of a convolution, that is normalized over as many elements as one of
// the result sums over. x / |x|, or x times the reciprocal root of the sum of its squares: the result has the scale of
// the other operand; with two such operands it is a cosine. x / sum(x): the result is a mean. Nothing for a product
// with a parameter, whose scale is chosen.
std::optional<NormalizedOperand> normalized_operand(const Node* product);

}  // namespace plumb
