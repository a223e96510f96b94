// Zeros in place of the results of large matrix products, attention and gelu: a capture records calls, not values.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace plumb {

// If the operator is one of them and its tensors are large ordinary CPU tensors: takes the arguments from the stack and
// puts a result of the right shape, strides, dtype and requires_grad there, filled with zeros. Otherwise returns false
// and leaves the stack alone.
bool fake_result(const c10::OperatorHandle& op, const std::string& name, torch::jit::Stack* stack);

}  // namespace plumb
