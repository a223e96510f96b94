// Results of the shape a call would give, without its arithmetic: for captures that only want the graph.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace plumb::capture_detail {

// Replaces the arguments of a matrix product on the stack by a tensor of zeros of the result's sizes, strides, dtype
// and need of a gradient. Answers false, with the stack as it was, for all other operators and for tensors that are not
// plain ones on the CPU.
bool stand_in(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Whether the sizes of the operator's results depend on values.
bool has_sizes_from_values(const c10::OperatorHandle& op);

}  // namespace plumb::capture_detail
