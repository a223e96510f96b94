// Rounding to formats whose blocks share a scale (OCP Microscaling Formats 1.0; NVFP4), and their codes.
//
// Blocks run along one dimension and start at its beginning; the last may be shorter. A block of zeros has the smallest
// scale. Infinity counts as the largest value of the tensor's dtype when the scale is chosen and then overflows as in
// any format; NaN does not count, stays NaN and leaves its neighbors alone. Elements are computed as x / scale,
// rounded, times the scale: in float32, for float64 tensors in float64. Powers of two are exact there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "plumb/numerics/format.h"

namespace plumb {

// quantise() for a format with shared scales. The result is a new tensor of x's sizes and dtype. `dim` is the blocks'
// dimension. A scalar is one block. Throws Error(InvalidArgument) for a dim that x does not have.
at::Tensor quantise_blocks(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, int64_t dim);

struct BlockCodes {
  at::Tensor codes;         // uint8, sizes of x: codes of the elements (codes.h)
  at::Tensor scales;        // uint8, the blocks' dimension last: E8M0 (2^(code - 127)) or e4m3fn codes
  at::Tensor tensor_scale;  // float32 [], of float64 tensors float64: what the scales are in units of
};

// As hardware and ml_dtypes have them: rounds as quantise() does, with the same stream for the same seed. All on x's
// device, which is not waited for.
BlockCodes encode_blocks(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed = std::nullopt,
                         int64_t dim = -1);
at::Tensor decode_blocks(const BlockCodes& codes, const FPFormat& format, at::ScalarType dtype = at::kFloat,
                         int64_t dim = -1);

}  // namespace plumb
