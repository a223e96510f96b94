// Rows with known mean and deviation, normalised. See kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

// In the operations of LibTorch's layer_norm, one for one: its vectors end in a fused multiplication and addition where
// the CPU has them.
inline void normalise_rows(const float* x, float* y, int64_t rows, int64_t n, const float* mean, const float* rstd,
                           const float* weight, const float* bias) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    const float shift = -mean[r], scale = rstd[r];
    for (int64_t i = 0; i < n; ++i) {
      const float normal = (x[i] + shift) * scale;
#if defined(__FMA__)
      y[i] = __builtin_fmaf(normal, weight[i], bias[i]);
#else
      y[i] = normal * weight[i] + bias[i];
#endif
    }
  }
}

}  // namespace
}  // namespace plumb::kernel
