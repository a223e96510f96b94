// The dimensions that a product sums over.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

struct ContractedDims {
  std::vector<int64_t> operands;  // for each, from the end or from the beginning
  int64_t result = -1;            // the dimension of the result that the gradient of the first operand sums over
};

// Returns the dimensions of a node with a contraction: what its operator says; of an einsum and a tensordot the last of
// those that their arguments say. nullopt if these two sum over no dimension that two operands share: elements are
// multiplied, rearranged or summed then, which is no matrix product.
std::optional<ContractedDims> contracted_dims(const Node* node, const State& state);

}  // namespace plumb
