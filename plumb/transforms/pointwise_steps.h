// A graph's node as steps of a pointwise program. Not for other rooms.
#pragma once

#include <optional>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/numerics/pointwise.h"

namespace plumb {

// In the steps, inputs (#0, #1) stand for `operands`.
struct LoweredNode {
  std::vector<Value*> operands;
  std::vector<PointwiseStep> steps;
};

// Nothing for operators that are not pointwise, whose operands differ in shape or dtype, or whose types are not known.
std::optional<LoweredNode> lower_pointwise(const Node* node);

}  // namespace plumb
