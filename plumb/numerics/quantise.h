// Rounds a tensor's values to a number format's.
//
// All functions take strided tensors of float32, float64, float16 or bfloat16 on any device, with any strides and any
// number of elements, and never record autograd history (the operators plumb::quantise and plumb::simulate_format do).
// The bits are the same on every device.
//   - NaN stays NaN; zeros keep their sign where the format has one; +-infinity is overflow.
//   - Overflow: +-max_absolute_value where format.saturate, else infinity, or NaN in a format without infinities.
//   - Values of the format that the tensor's dtype cannot hold (bf16's largest in a float16 tensor) count as overflow.
//   - Subnormals of format and dtype are exact; the processor's flush-to-zero mode must be off, as it is by default.
// Stochastic rounding adds `srbits` random bits below the last kept one; the result depends on the seed and on each
// element's place in memory order, not on the device, the number of threads, or whether values are float16 or float64.
// Without a seed one is drawn from torch's default CPU generator (torch.manual_seed).
// `dim`: along which blocks share scales, in formats that have them (blocks.h); else it means nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "plumb/numerics/format.h"
#include "plumb/numerics/metrics.h"

namespace plumb {

// A new tensor with x's sizes and dtype, and its strides where they are dense.
at::Tensor quantise(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed = std::nullopt,
                    int64_t dim = -1);

// Into `out`: same sizes and dtype, any strides; may be x itself or share memory with it.
at::Tensor& quantise_out(at::Tensor& out, const at::Tensor& x, const FPFormat& format,
                         std::optional<uint64_t> seed = std::nullopt, int64_t dim = -1);

// In place.
at::Tensor& quantise_(at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed = std::nullopt,
                      int64_t dim = -1);

// quantise() that measures x (before) and the result (after), either may be null, in the same pass over memory on
// the CPU. Waits for a device.
at::Tensor quantise_and_measure(const at::Tensor& x, const FPFormat& format, TensorMetrics* before,
                                TensorMetrics* after, const MetricsOptions& options = {},
                                std::optional<uint64_t> seed = std::nullopt, int64_t dim = -1);

// x rounded, and the codes of its memory from first to last element; no codes where there is a NaN that the format
// has not. On the CPU.
std::pair<at::Tensor, at::Tensor> quantise_and_pack(const at::Tensor& x, const FPFormat& format,
                                                    std::optional<uint64_t> seed);

// 64 bits of torch's default CPU generator.
uint64_t draw_seed();

}  // namespace plumb
