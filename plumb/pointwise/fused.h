// A program in one kernel on devices that have such kernels (plumb/cuda), for operators that are not plumb::pointwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plumb/pointwise/pointwise.h"

namespace plumb {

// Returns whether tensors like x have such kernels.
bool fuses_pointwise(const at::Tensor& x);

// Returns the program's result, on the CPU in blocks that stay in cache (float32 and float64). Every step is rounded to
// the inputs' dtype, as operators one by one would. Undefined if there is no such kernel for the inputs' device or
// dtype, or the inputs are no dense tensors of one dtype and size in C order: the caller has operators of its own for
// these. Inputs must be nothing that autograd sees.
at::Tensor fused_pointwise(const PointwiseProgram& program, at::TensorList inputs);

// Returns the gradients of the inputs that are wanted, all undefined where there are no such kernels. Steps of the
// forward pass are computed again from the inputs.
std::vector<at::Tensor> fused_pointwise_backward(const PointwiseProgram& program, const at::Tensor& gradient,
                                                 at::TensorList inputs, const std::vector<bool>& wanted);

// Returns a step `kind` on input 0, times `before` on its way in and `after` on its way out; the gradient times `back`.
PointwiseProgram scaled_step(PointwiseKind kind, double before, double after, double back);

}  // namespace plumb
