// Shared by the kernel files: bits, widening and narrowing, the random streams. Everything has internal linkage and
// nothing of the standard library is instantiated: these files are compiled for several CPU levels.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "plumb/numerics/kernels.h"

namespace plumb::kernel {
namespace {

constexpr int kChunk = 4096;  // values that pass through L1 together

template <class T>
struct FloatTraits;
template <>
struct FloatTraits<float> {
  using Bits = uint32_t;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr Bits sign = 0x80000000u, exponent = 0x7f800000u;
};
template <>
struct FloatTraits<double> {
  using Bits = uint64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr Bits sign = 0x8000000000000000u, exponent = 0x7ff0000000000000u;
};
template <class T>
using BitsOf = typename FloatTraits<T>::Bits;

template <class T>
inline BitsOf<T> to_bits(T value) {
  return __builtin_bit_cast(BitsOf<T>, value);
}
inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline double from_bits(uint64_t bits) { return __builtin_bit_cast(double, bits); }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// 2^e as T, subnormals included; infinity above, zero below.
template <class T>
inline T power_of_two(int e) {
  using F = FloatTraits<T>;
  if (e > F::bias) return __builtin_inf();
  if (e >= 1 - F::bias) return from_bits(BitsOf<T>(e + F::bias) << F::mantissa);
  int shift = e - (1 - F::bias - F::mantissa);
  return shift < 0 ? T(0) : from_bits(BitsOf<T>(1) << shift);
}

// --- carriers of 16 bits, to and from float

struct Half {
  uint16_t bits;
};
struct BHalf {
  uint16_t bits;
};

inline float widen_one(Half h) {
  // A half's subnormals become float's by a multiplication that is exact.
  uint32_t sign = uint32_t(h.bits & 0x8000) << 16, magnitude = uint32_t(h.bits & 0x7fff) << 13;
  uint32_t scaled = to_bits(from_bits(magnitude) * power_of_two<float>(112));
  return from_bits(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : scaled));
}
inline float widen_one(BHalf h) { return from_bits(uint32_t(h.bits) << 16); }

// Round to nearest even; NaN stays NaN.
inline Half narrow_one(Half, float value) {
  uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  uint32_t small = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? small : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return Half{uint16_t(sign | result)};
}
inline BHalf narrow_one(BHalf, float value) {
  uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffffu;
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return BHalf{uint16_t(magnitude > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded)};
}

inline void widen(const BHalf* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen_one(from[i]);
}
inline void narrow(const float* from, int64_t n, BHalf* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = narrow_one(BHalf{}, from[i]);
}
inline void widen(const Half* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; ++i) to[i] = widen_one(from[i]);
}
inline void narrow(const float* from, int64_t n, Half* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; ++i) to[i] = narrow_one(Half{}, from[i]);
}

template <class C>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};

template <class C>
constexpr bool kDirect = sizeof(C) >= 4;  // float and double are worked on where they lie

// --- results too large for any cache: written past it, so that their lines are not read first

constexpr int64_t kStreamBytes = int64_t(16) << 20;

#if defined(__SSE2__)
inline bool can_stream(const void* to) { return reinterpret_cast<uintptr_t>(to) % 64 == 0; }
// `to` on a cache line's start. `next` is asked for meanwhile, as far as it will be read.
inline void stream(const void* from_void, int64_t bytes, void* to_void, const char* next) {
  const char* from = static_cast<const char*>(from_void);
  char* to = static_cast<char*>(to_void);
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(next + i);
    for (int k = 0; k < 64; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + k),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(from + i + k)));
  }
  __builtin_memcpy(to + i, from + i, size_t(bytes - i));
}
inline void end_stream() { _mm_sfence(); }
#else
inline bool can_stream(const void*) { return false; }
inline void stream(const void* from, int64_t bytes, void* to, const char*) {
  __builtin_memcpy(to, from, size_t(bytes));
}
inline void end_stream() {}
#endif

// --- random numbers: xoshiro128++ (Blackman, Vigna) in 64 lanes, each lane's state one call of Philox4x32-10 (Salmon
// et al., 2011) on (lane, block) under the seed. A block's numbers depend on seed and block only, so any split over
// threads gives the same.

constexpr int kLanes = 64;

struct Random {
  alignas(64) uint32_t s0[kLanes], s1[kLanes], s2[kLanes], s3[kLanes];

  void seed(uint64_t seed, uint64_t block) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t a = uint32_t(lane), b = uint32_t(block), c = uint32_t(block >> 32), d = 0x706c6d62u;
      uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
      for (int round = 0; round < 10; ++round) {
        uint64_t p = uint64_t(0xD2511F53u) * a, q = uint64_t(0xCD9E8D57u) * c;
        a = uint32_t(q >> 32) ^ b ^ key0;
        b = uint32_t(q);
        c = uint32_t(p >> 32) ^ d ^ key1;
        d = uint32_t(p);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
      }
      s0[lane] = a, s1[lane] = b, s2[lane] = c, s3[lane] = d;
    }
  }

  uint32_t next(int lane) {
    uint32_t sum = s0[lane] + s3[lane], result = (sum << 7 | sum >> 25) + s0[lane], t = s1[lane] << 9;
    s2[lane] ^= s0[lane];
    s3[lane] ^= s1[lane];
    s1[lane] ^= s2[lane];
    s0[lane] ^= s3[lane];
    s2[lane] ^= t;
    s3[lane] = s3[lane] << 11 | s3[lane] >> 21;
    return result;
  }
};

}  // namespace
}  // namespace plumb::kernel
