// Results of operators that are not what a forward computes: a capture records calls, not values.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "plumb/operators/operator_facts.h"

namespace plumb {

// If the operator is a matrix product, attention or gelu and its tensors are large ordinary CPU tensors: takes the
// arguments from the stack and puts a result of the right shape, strides, dtype and requires_grad there, filled with
// zeros. Otherwise returns false and leaves the stack alone.
bool fake_result(const c10::OperatorHandle& op, const std::string& name, torch::jit::Stack* stack);

// If the operator is a product or convolution with a floating-point result: puts that, divided by its root mean square
// if it is larger than 1, on top of the stack in its place. Leaves results alone that an argument holds.
void limit_product(const c10::OperatorHandle& op, const OperatorFacts& facts, torch::jit::Stack* stack);

}  // namespace plumb
