// Results of large matrix products, attention and gelu that a capture does not need: it records calls, not values.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace plumb {

// Where the operator is such a one of ordinary CPU tensors: takes its arguments from the stack and puts a result
// of the right shape, strides, dtype and requires_grad there, filled with zeros. Otherwise false, and nothing has
// happened.
bool stand_in(const c10::OperatorHandle& op, const std::string& name, torch::jit::Stack* stack);

}  // namespace plumb
