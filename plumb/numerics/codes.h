// Values of formats of up to 8 bits as one byte each: for activations kept for the backward pass, and for the wire.
//
// A code is the format's own (sign, exponent, mantissa), in the low bits of the byte. Formats that have no code for NaN
// borrow one: 8-bit ones that of negative zero (so -0 comes back as +0, as in the fnuz formats), smaller ones 0xff.
// decode(encode(x)) is quantise(x), NaN kept, but for that sign of zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "plumb/numerics/format.h"

namespace plumb {

// A uint8 tensor of x's sizes. Rounds as quantise() does, with the same stream for the same seed.
at::Tensor encode(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed = std::nullopt);

// codes: uint8. dtype: float32, float64, float16 or bfloat16; values beyond float16's range become infinity. Bytes that
// are no code (above the format's bits) become NaN.
at::Tensor decode(const at::Tensor& codes, const FPFormat& format, at::ScalarType dtype = at::kFloat);

// One code's value: slow, for tables and tests.
double decode_one(uint8_t code, const FPFormat& format);

// Codes of a dense tensor's values, which are the format's, zeros with their signs; undefined if there is a NaN that
// the format has not, off the CPU for every format that has none, as nothing waits for a device. And back.
at::Tensor pack_codes(const at::Tensor& x, const FPFormat& format);
at::Tensor unpack_codes(const at::Tensor& codes, const FPFormat& format, at::ScalarType dtype);

}  // namespace plumb
