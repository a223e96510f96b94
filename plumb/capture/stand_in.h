// Results of the shape a call would give, without its arithmetic: for captures that only want the graph.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace plumb::capture_detail {

// Calls a matrix product on the stack with nothing to multiply: sums of no products have the sizes, strides, dtype and
// need of a gradient of the real ones. Answers false, with the stack as it was, for all other operators.
bool stand_in(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Whether the sizes of the operator's results depend on values.
bool has_sizes_from_values(const c10::OperatorHandle& op);

}  // namespace plumb::capture_detail
