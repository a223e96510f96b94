// Formats and values that rounding is tried on.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

namespace plumb::values_testing {

inline const std::vector<const char*> kFormats = {
    "E4M3-RN",     "E5M2-RN",       "E2M1-RN",   "E3M0-RN",     "E4M0-RN",     "E2M0-RN",         "E8M3-RN",
    "E8M0-RN",     "E7M10-RN",      "E5M21-RN",  "E5M22-RN",    "E5M23-RN",    "E8M22-RN",        "E8M23-RN",
    "e4m3fn-RN",   "e4m3fn-RN-inf", "e5m2-RN",   "e5m2-RN-inf", "e4m3fnuz-RN", "e5m2fnuz-RN-inf", "e3m4-RN",
    "e2m1fn-RN",   "e2m3fn-RN",     "e3m2fn-RN", "fp16-RN",     "fp16-RN-sat", "bf16-RN",         "bf16-RN-sat",
    "tf32-RN",     "fp32-RN",       "E4M3-RZ",   "E3M0-RZ",     "E8M3-RZ",     "E5M22-RZ",        "e4m3fn-RZ-inf",
    "e5m2-RZ-inf", "e4m3fnuz-RZ",   "fp16-RZ",   "bf16-RZ",     "fp32-RZ"};

inline at::Tensor all_16_bit_values(at::ScalarType dtype) {
  at::Tensor bits = at::arange(65536, at::kInt).to(at::kShort);
  return bits.view(dtype);
}

// All exponents, and around each the mantissas where rounding turns.
inline at::Tensor float_grid() {
  std::vector<float> values;
  for (uint32_t e = 0; e < 256; ++e)
    for (int kept = 0; kept <= 23; ++kept)
      for (uint32_t top : {0u, 1u, 2u, 3u, (1u << kept) - 1, (1u << kept) - 2})
        for (int64_t half : {-1, 0, 1}) {
          int64_t mantissa =
              (int64_t(top & ((1u << kept) - 1)) << (23 - kept)) + (kept < 23 ? 1 << (22 - kept) : 0) + half;
          uint32_t bits = (e << 23) + uint32_t(mantissa & 0x7fffff);
          for (uint32_t sign : {0u, 0x80000000u}) {
            float f;
            uint32_t word = bits | sign;
            std::memcpy(&f, &word, 4);
            values.push_back(f);
          }
        }
  return at::tensor(values);
}

// The same bits, but that a NaN is a NaN.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (!at::isFloatingType(a.scalar_type())) return at::equal(a, b);
  const auto integers = a.element_size() == 4 ? at::kInt : a.element_size() == 8 ? at::kLong : at::kShort;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return (x.view(integers) == y.view(integers)).logical_or(x.isnan().logical_and(y.isnan())).all().item<bool>();
}

}  // namespace plumb::values_testing
