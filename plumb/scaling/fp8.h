// Codes of FP8 as the operands of products: their kernels, and the codes of weights, which a step makes once.
//
// A code is a byte as plumb::encode makes it, for e4m3fn and e5m2 that of torch's float8_e4m3fn and float8_e5m2.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "plumb/numerics/format.h"

namespace plumb {

// The kernel that multiplies two matrices of codes.
//   ScaledMM  torch's _scaled_mm: FP8 units where the device has them. On a CPU without them torch multiplies float32
//             copies, the second one row by row in memory, and puts the factor into the first one.
//   Decoded   the product of the values, as the simulation computes it: bit for bit the same.
//   Auto      ScaledMM on devices with FP8 units (asked once a device), Decoded elsewhere and for float64.
enum class Fp8Kernel { Auto, ScaledMM, Decoded };
// Parses "auto", "scaled_mm" or "decoded"; else Error(InvalidArgument).
Fp8Kernel parse_fp8_kernel(std::string_view text);

// Returns the format "e4m3fn" or "e5m2", with any rounding. Throws Error(InvalidArgument) for another text.
const FPFormat& fp8_format(std::string_view text);

// float8_e4m3fn or float8_e5m2.
at::ScalarType fp8_dtype(const FPFormat& format);

// Returns whether products of codes on this device, with results of `dtype`, go to _scaled_mm. Throws
// Error(Unsupported) for ScaledMM where torch cannot multiply codes on this device: tried once a device, with a small
// product of each pair of formats.
bool uses_scaled_mm(Fp8Kernel kernel, at::Device device, at::ScalarType dtype);

// Returns alpha * a @ b by _scaled_mm, of matrices of codes (uint8) or equal batches of them. Dimensions that the units
// do not take (no multiple of 16) are filled up with zeros, and the second operand is copied where it does not lie
// column by column. `dtype`: float32, bfloat16 or float16. Throws Error(TensorMismatch) if they have no product.
at::Tensor scaled_mm(const at::Tensor& a, const FPFormat& format_a, const at::Tensor& b, const FPFormat& format_b,
                     double alpha, at::ScalarType dtype);

// Returns the codes of a weight: made for every call, and while a KeepWeightCodes lives only when the weight was
// written (its version counter, its memory). Rounding stochastically, they are always made for every call.
at::Tensor encode_weight(const at::Tensor& weight, std::string_view format);

// While one lives, in any thread, codes of weights (and their transposed copies for the units) stay until the last one
// goes: a step of a pipeline casts each weight once, its microbatches share the codes. Weights are not to be written
// meanwhile behind autograd's back.
class KeepWeightCodes {
 public:
  KeepWeightCodes();
  ~KeepWeightCodes();
  KeepWeightCodes(const KeepWeightCodes&) = delete;
  KeepWeightCodes& operator=(const KeepWeightCodes&) = delete;
};

}  // namespace plumb
