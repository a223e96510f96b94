// The room's operators, as C++ calls through the dispatcher: they record autograd history and are seen by capture.
//   plumb::quantise(x, format, rounding, srbits, seed, dim)   rounded; the gradient passes unchanged (straight through)
//   dim: along which blocks share scales, in formats that have them
//   plumb::encode(x, format, seed), plumb::decode(codes, format, dtype)     one-byte codes (codes.h)
//   plumb::tensor_metrics(x, histogram)   float64 [9] or [9 + 256]: the fields of TensorMetrics in order, then the bins
// On any device, with the same bits but for metrics' sums (aten_kernels.h); no result is waited for.
// Formats are texts that FPFormat::parse() takes, read once. rounding "" and srbits 0 mean the format's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "plumb/numerics/format.h"
#include "plumb/numerics/metrics.h"

namespace plumb::ops {

at::Tensor quantise(const at::Tensor& x, std::string_view format, std::string_view rounding = "", int64_t srbits = 0,
                    std::optional<int64_t> seed = std::nullopt, int64_t dim = -1);
at::Tensor encode(const at::Tensor& x, std::string_view format, std::optional<int64_t> seed = std::nullopt);
at::Tensor decode(const at::Tensor& codes, std::string_view format, at::ScalarType dtype = at::kFloat);
at::Tensor tensor_metrics(const at::Tensor& x, bool histogram = false);

}  // namespace plumb::ops

namespace plumb {

// FPFormat::parse(), remembered. The reference stays valid.
const FPFormat& cached_format(std::string_view text);

// Reads the result of tensor_metrics().
TensorMetrics metrics_of_tensor(const at::Tensor& values);

}  // namespace plumb
