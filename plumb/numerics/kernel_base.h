// Shared by the kernel files: bits, widening and narrowing, the random streams. Everything has internal linkage and
// nothing of the standard library is instantiated: these files are compiled for several CPU levels.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "plumb/numerics/element.h"

namespace plumb::kernel {
namespace {

constexpr int kChunk = 4096;  // values that pass through L1 together

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

// --- random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
//
// A group is 256 values in memory order. Of group g the values j, 64 + j, 128 + j and 192 + j (j < 64) take words 0 to
// 3 of the call with counter (64 g + j in 64 bits, 0, 'plmb') under the seed as key: vectors are stored as they come,
// and any split at groups gives the same numbers.

constexpr int kLanes = 64;
static_assert(kRandomGroup == 4 * kLanes);

// Words in the low halves of 64 bits, whatever is above them: what the processors multiply to 64 bits.
#if defined(__AVX512F__)
typedef uint64_t Wide __attribute__((vector_size(64)));
inline Wide multiply_low(Wide a, Wide b) { return (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
typedef uint64_t Wide __attribute__((vector_size(32)));
inline Wide multiply_low(Wide a, Wide b) { return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
#elif defined(__SSE2__)
typedef uint64_t Wide __attribute__((vector_size(16)));
inline Wide multiply_low(Wide a, Wide b) { return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
typedef uint64_t Wide __attribute__((vector_size(16)));
inline Wide multiply_low(Wide a, Wide b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif
constexpr int kWideLanes = sizeof(Wide) / 8;
typedef uint32_t Narrow __attribute__((vector_size(4 * kWideLanes)));

class Random {
 public:
  // The group that next_group() gives first.
  Random(uint64_t seed, uint64_t group) : seed_(seed), counter_(group * kLanes) {}

  const uint32_t* next_group() {
    for (int lane = 0; lane < kLanes; lane += kWideLanes) {
      Wide a{}, b = Wide{} + (counter_ >> 32), c{}, d = Wide{} + kPhiloxDomain;
      for (int i = 0; i < kWideLanes; ++i) a[i] = counter_ + uint64_t(lane + i);
      uint32_t key0 = uint32_t(seed_), key1 = uint32_t(seed_ >> 32);
      for (int round = 0; round < 10; ++round) {
        const Wide p = multiply_low(a, Wide{} + kPhilox0), q = multiply_low(c, Wide{} + kPhilox1);
        a = (q >> 32) ^ b ^ (Wide{} + key0);
        b = q;
        c = (p >> 32) ^ d ^ (Wide{} + key1);
        d = p;
        key0 += kPhiloxKey0;
        key1 += kPhiloxKey1;
      }
      const Wide words[4] = {a, b, c, d};
      for (int word = 0; word < 4; ++word) {
        const Narrow narrow = __builtin_convertvector(words[word], Narrow);
        __builtin_memcpy(words_ + word * kLanes + lane, &narrow, sizeof narrow);
      }
    }
    counter_ += kLanes;
    return words_;
  }

 private:
  const uint64_t seed_;
  uint64_t counter_;  // a multiple of kLanes: its low half does not overflow within a group
  alignas(64) uint32_t words_[kRandomGroup];
};

}  // namespace
}  // namespace plumb::kernel
