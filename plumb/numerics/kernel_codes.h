// One-byte codes. Compiled once per CPU level; see kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

// Writes the last byte of each word; the others are zero. Highway 1.0.3 narrows four vectors in order by ways that cost
// pack() a tenth of its speed, GCC 12 a fifth.
inline void narrow_words(const uint32_t* words, int n, uint8_t* bytes) {
  int i = 0;
#if HWY_ARCH_X86 && HWY_TARGET != HWY_AVX3
  auto load = [&](int at) { return _mm_load_si128(reinterpret_cast<const __m128i*>(words + at)); };
  for (; i + 16 <= n; i += 16) {
    const __m128i low = _mm_packs_epi32(load(i), load(i + 4)), high = _mm_packs_epi32(load(i + 8), load(i + 12));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), _mm_packus_epi16(low, high));
  }
#endif
  for (; i < n; ++i) bytes[i] = uint8_t(words[i]);
}

// Codes of values that are already the format's.
template <class T>
inline void codes_of(const T* x, uint8_t* codes, int n, const CodeSpec& spec) {
  const CodeConstants c(spec);
  const bool finite = spec.nan_code < 0 && spec.negative_zero;  // and every sign is kept
  constexpr int kWords = 256;
  alignas(64) uint32_t words[kWords];
  for (int begin = 0; begin < n; begin += kWords) {
    const int m = n - begin < kWords ? n - begin : kWords;
    const T* from = x + begin;
    if (finite) {
      for (int i = 0; i < m; ++i) words[i] = code_of<true>(float(from[i]), c);
    } else {
      for (int i = 0; i < m; ++i) words[i] = code_of<false>(float(from[i]), c);
    }
    narrow_words(words, m, codes + begin);
  }
}

// Nothing is NaN, or the format has one.
template <class T>
inline bool fits_codes(const T* x, int n, const CodeSpec& spec) {
  if (spec.nan_code >= 0) return true;
  uint32_t nans = 0;
  for (int i = 0; i < n; ++i) nans |= uint32_t(x[i] != x[i]);
  return !nans;
}

// Values of codes in which nothing but the sign's bit is above the magnitude: negative zero is a zero.
template <class C>
void unpack_all(const uint8_t* codes, void* y_void, int64_t n, const CodeSpec& spec) {
  C* y = static_cast<C*>(y_void);
  const int down = 23 - spec.mantissa_bits, to_sign = 32 - spec.bits;
  const uint32_t sign_bit = uint32_t(1) << (spec.bits - 1), least_normal = uint32_t(1) << spec.mantissa_bits;
  const uint32_t rebias = uint32_t(127 - spec.bias) << 23;
  const uint32_t infinity = uint32_t(spec.infinity_code), nan_from = uint32_t(spec.nan_code);
  const float spacing = power_of_two<float>(1 - spec.bias - spec.mantissa_bits);
  alignas(64) float values[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int m = int(smaller(n - i, kChunk));
    float* to = values;
    if constexpr (sizeof(C) == 4) to = y + i;
    const uint8_t* from = codes + i;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
    for (int j = 0; j < m; ++j) {
      const uint32_t code = from[j], magnitude = code & (sign_bit - 1), sign = (code & sign_bit) << to_sign;
      const uint32_t normal = (magnitude << down) + rebias, small = to_bits(float(int32_t(magnitude)) * spacing);
      uint32_t bits = magnitude < least_normal ? small : normal;
      bits = magnitude == infinity ? 0x7f800000u : bits;
      bits = magnitude >= nan_from ? 0x7fc00000u : bits;
      to[j] = from_bits(bits | sign);
    }
    if constexpr (sizeof(C) == 8) {
      for (int j = 0; j < m; ++j) y[i + j] = values[j];
    } else if constexpr (sizeof(C) == 2) {
      narrow(values, m, y + i);
    }
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
    const T* from = widened(x + i, m, wide);
    if (!fits_codes(from, m, spec)) return false;
    codes_of(from, codes + i, m, spec);
  }
  return true;
}

}  // namespace
}  // namespace plumb::kernel
