// One-byte codes. Compiled once per CPU level; see kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"
#include "plumb/numerics/kernel_round.h"

namespace plumb::kernel {
namespace {

// Codes of values that are already the format's.
template <class T>
inline void codes_of(const T* x, uint8_t* codes, int n, const CodeSpec& spec) {
  const int down = 23 - spec.mantissa_bits;
  const uint32_t rebias = uint32_t(127 - spec.bias) << spec.mantissa_bits;
  const float least_normal = power_of_two<float>(1 - spec.bias);
  const float magic = power_of_two<float>(1 - spec.bias - spec.mantissa_bits + 23);
  const uint32_t magic_bits = to_bits(magic);
  const uint32_t sign_bit = uint32_t(1) << (spec.bits - 1);
  const uint32_t zero_sign = spec.negative_zero ? sign_bit : 0, nan_sign = spec.nan_is_signed ? sign_bit : 0;
  const uint32_t nan = uint32_t(spec.nan_code), infinity = uint32_t(spec.infinity_code);
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = to_bits(float(x[i])), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 31 ? sign_bit : 0;
    const float a = from_bits(magnitude);
    const uint32_t normal = (magnitude >> down) - rebias, small = to_bits(a + magic) - magic_bits;
    uint32_t code = a < least_normal ? small : normal;
    code = magnitude == 0x7f800000u ? infinity : code;
    uint32_t signed_code = code | (code == 0 ? sign & zero_sign : sign);
    codes[i] = uint8_t(magnitude > 0x7f800000u ? nan | (sign & nan_sign) : signed_code);
  }
}

template <class C>
void encode_all(const void* x_void, uint8_t* codes, int64_t n, const RoundingSpec& spec, const CodeSpec& code_spec,
                uint64_t seed, int64_t first_block) {
  using T = typename ComputeOf<C>::type;
  const C* x = static_cast<const C*>(x_void);
  const RoundingConstants<T> constants(spec);
  const RoundRun<T> run = choose_round<T>(spec);
  Random random;
  alignas(64) T rounded[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    if (spec.mode == RoundingSpec::Stochastic && i % kRandomBlock == 0)
      random.seed(seed, uint64_t(first_block + i / kRandomBlock));
    const int m = int(smaller(n - i, kChunk));
    const T* from = rounded;
    if constexpr (kDirect<C>)
      from = x + i;
    else
      widen(x + i, m, rounded);
    run(from, rounded, m, constants, &random);
    codes_of(rounded, codes + i, m, code_spec);
  }
}

template <class Word>
void decode_all(const uint8_t* codes, void* y_void, int64_t n, const void* values_void) {
  const Word* values = static_cast<const Word*>(values_void);
  Word* y = static_cast<Word*>(y_void);
  for (int64_t i = 0; i < n; ++i) y[i] = values[codes[i]];
}

template <class C>
bool pack_all(const void* x_void, uint8_t* codes, int64_t n, const CodeSpec& spec) {
  using T = typename ComputeOf<C>::type;
  const C* x = static_cast<const C*>(x_void);
  alignas(64) T wide[kDirect<C> ? 1 : kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int m = int(smaller(n - i, kChunk));
    const T* from = wide;
    if constexpr (kDirect<C>)
      from = x + i;
    else
      widen(x + i, m, wide);
    if (spec.nan_code < 0) {
      uint32_t nans = 0;
      for (int j = 0; j < m; ++j) nans |= uint32_t(from[j] != from[j]);
      if (nans) return false;
    }
    codes_of(from, codes + i, m, spec);
  }
  return true;
}

}  // namespace
}  // namespace plumb::kernel
