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

// Values in the type that they are computed in: where they lie, or widened into `wide`.
inline const float* widened(const float* from, int64_t, float*) { return from; }
inline const double* widened(const double* from, int64_t, double*) { return from; }
template <class C>
inline const float* widened(const C* from, int64_t n, float* wide) {
  widen(from, n, wide);
  return wide;
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

// Words in the low halves of 64 bits, whatever is above them: what the processors multiply to 64 bits. packed() has the
// low halves of both, of each 16 bytes a's before b's.
#if defined(__AVX512F__)
typedef uint64_t Wide __attribute__((vector_size(64)));
inline Wide multiply_low(Wide a, Wide b) { return (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b); }
inline Wide xor_of(Wide a, Wide b, Wide c) {
  return (Wide)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
inline Wide packed(Wide a, Wide b) { return (Wide)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88); }
#elif defined(__AVX2__)
typedef uint64_t Wide __attribute__((vector_size(32)));
inline Wide multiply_low(Wide a, Wide b) { return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
inline Wide xor_of(Wide a, Wide b, Wide c) { return a ^ b ^ c; }
inline Wide packed(Wide a, Wide b) { return (Wide)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88); }
#elif defined(__SSE2__)
typedef uint64_t Wide __attribute__((vector_size(16)));
inline Wide multiply_low(Wide a, Wide b) { return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)b); }
inline Wide xor_of(Wide a, Wide b, Wide c) { return a ^ b ^ c; }
inline Wide packed(Wide a, Wide b) { return (Wide)_mm_shuffle_ps((__m128)a, (__m128)b, 0x88); }
#else
typedef uint64_t Wide __attribute__((vector_size(16)));
inline Wide multiply_low(Wide a, Wide b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
inline Wide xor_of(Wide a, Wide b, Wide c) { return a ^ b ^ c; }
inline Wide packed(Wide a, Wide b) {
  const uint32_t low[4] = {uint32_t(a[0]), uint32_t(a[1]), uint32_t(b[0]), uint32_t(b[1])};
  Wide both;
  __builtin_memcpy(&both, low, sizeof both);
  return both;
}
#endif
constexpr int kWideLanes = sizeof(Wide) / 8;
constexpr int kPairLanes = 2 * kWideLanes;  // calls at once, in two vectors: one multiplies while the other waits
static_assert(kLanes % kPairLanes == 0);

class Random {
 public:
  // The group that next_group() gives first.
  Random(uint64_t seed, uint64_t group) : seed_(seed), counter_(group * kLanes) {
    for (int i = 0; i < kWideLanes; ++i) place_[i] = uint64_t(i) / 2 * 4 + uint64_t(i) % 2;  // as packed() takes them
    for (int round = 0; round < 8; ++round) {
      keys_[round][0] = Wide{} + uint32_t(uint32_t(seed) + uint32_t(round + 2) * kPhiloxKey0);
      keys_[round][1] = Wide{} + uint32_t(uint32_t(seed >> 32) + uint32_t(round + 2) * kPhiloxKey1);
    }
  }

  // (Inlined it costs the functions around it their registers.)
  __attribute__((noinline)) const uint32_t* next_group() {
    for (int lane = 0; lane < kLanes; lane += kPairLanes) {
      Wide a[2], b[2], c[2], d[2];
      for (int k = 0; k < 2; ++k) two_rounds(place_ + (counter_ + uint64_t(lane + 2 * k)), a[k], b[k], c[k], d[k]);
#pragma GCC unroll 8
      for (int round = 0; round < 8; ++round) {
        for (int k = 0; k < 2; ++k) {
          const Wide p = multiply_low(a[k], Wide{} + kPhilox0), q = multiply_low(c[k], Wide{} + kPhilox1);
          a[k] = xor_of(q >> 32, b[k], keys_[round][0]);
          b[k] = q;
          c[k] = xor_of(p >> 32, d[k], keys_[round][1]);
          d[k] = p;
        }
      }
      const Wide words[4] = {packed(a[0], a[1]), packed(b[0], b[1]), packed(c[0], c[1]), packed(d[0], d[1])};
      for (int word = 0; word < 4; ++word) __builtin_memcpy(words_ + word * kLanes + lane, &words[word], sizeof(Wide));
    }
    counter_ += kLanes;
    return words_;
  }

 private:
  // The first two rounds of counters (low, high half of counter_, 0, kPhiloxDomain): half of their products are of
  // numbers that all lanes share.
  void two_rounds(Wide low, Wide& a, Wide& b, Wide& c, Wide& d) const {
    const uint32_t key0 = uint32_t(seed_), key1 = uint32_t(seed_ >> 32);
    const uint64_t shared = uint64_t(kPhilox0) * (uint32_t(counter_ >> 32) ^ key0);
    const Wide p = multiply_low(low, Wide{} + kPhilox0);
    const Wide q = multiply_low((p >> 32) ^ (Wide{} + (kPhiloxDomain ^ key1)), Wide{} + kPhilox1);
    a = (q >> 32) ^ (Wide{} + uint32_t(key0 + kPhiloxKey0));
    b = q;
    c = p ^ (Wide{} + ((shared >> 32) ^ uint32_t(key1 + kPhiloxKey1)));
    d = Wide{} + (shared & 0xffffffffu);
  }

  const uint64_t seed_;
  uint64_t counter_;         // a multiple of kLanes: its low half does not overflow within a group
  Wide place_, keys_[8][2];  // keys of the rounds after two_rounds()
  alignas(64) uint32_t words_[kRandomGroup];
};

}  // namespace
}  // namespace plumb::kernel
