// Factors of dropout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace plumb {

// Returns a tensor like x, with strides as at::empty_like's: `value`, in x's dtype, with probability `kept` (0 to 1, in
// steps of 2^-32 and at least one of them), else 0. The Philox word of a value's place in memory decides
// (kernel_base.h), so that the seed gives the same bits on every device and with any number of threads. x's values are
// not read. Throws Error(TensorMismatch) for a tensor that is not of float32, float64, float16 or bfloat16, strided,
// with values.
at::Tensor dropout_noise(const at::Tensor& x, double kept, double value, uint64_t seed);

}  // namespace plumb
