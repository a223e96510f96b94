// Softmax and RMS norm of the rows of CUDA tensors, a kernel for each and for its gradient (rows.cuh). Values are
// rounded where torch's operators would round them one by one; sums have another order.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace plumb::cuda {

// Returns whether x is of the kind and dtype that have these kernels, in C order, and has values. Nothing that autograd
// or a mode watches may come.
bool takes_rows(const at::Tensor& x);

// Below, tensors that are given satisfy takes_rows() and are on one device; results are undefined where this machine
// has no kernel (launch.h), and nothing was done then.

// after * softmax(before * x) along the last dimension.
at::Tensor softmax(const at::Tensor& x, double before, double after);
// after * p * (grad - sum(grad * p)), p = probability * result; `result` and `grad` of one dtype.
at::Tensor softmax_gradient(const at::Tensor& grad, const at::Tensor& result, double probability, double after);

// Rows are of `length` values. weight: undefined, or `length` values. result: x * rstd * weight, of x's dtype and
// sizes; rstd: 1 / sqrt(mean(x * x) + eps), float32 [rows].
struct RmsNorm {
  at::Tensor result, rstd;
};
RmsNorm rms_norm(const at::Tensor& x, int64_t length, const at::Tensor& weight, double eps);
// The gradients that are wanted, of grad and x of one dtype: the input's, and the weight's in float32 [length].
struct RmsNormGradient {
  bool done = false;
  at::Tensor input, weight;
};
RmsNormGradient rms_norm_gradient(const at::Tensor& grad, const at::Tensor& x, int64_t length, const at::Tensor& weight,
                                  const at::Tensor& rstd, bool want_input, bool want_weight);

// Sets the kind of device that has these kernels: CUDA; tests, which emulate them, name the CPU.
void use_rows_on(at::DeviceType kind);

}  // namespace plumb::cuda
