// Rounding to a format. Compiled once per CPU level; see kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

// x and y may be the same. By chance, all but a tensor's last call take whole groups of random numbers.
template <class T, Way kWay, bool kSimple>
inline void round_run(const T* x, T* y, int64_t n, const RoundingConstants<T>& constants, Random* random) {
  const RoundingConstants<T> c = constants;
  if constexpr (kWay == kByChance) {
    int64_t i = 0;
    for (; i + kRandomGroup <= n; i += kRandomGroup) {
      const uint32_t* words = random->next_group();
      for (int j = 0; j < kRandomGroup; ++j) y[i + j] = round_one<T, kWay, kSimple>(x[i + j], words[j], c);
    }
    if (i == n) return;
    const uint32_t* words = random->next_group();
    for (int j = 0; i < n; ++i, ++j) y[i] = round_one<T, kWay, kSimple>(x[i], words[j], c);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = round_one<T, kWay, kSimple>(x[i], 0, c);
  }
}

// The whole of a large tensor past the cache: four pages side by side, so that several are on their way, in vectors
// that go straight from registers to memory.
#if defined(__SSE2__) && defined(__GNUC__) && !defined(__clang__)
constexpr bool kCanStreamRounding = true;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float FloatVector __attribute__((vector_size(4 * kWidth)));
typedef uint32_t WordVector __attribute__((vector_size(4 * kWidth)));

inline void stream_vector(float* to, FloatVector value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)value);
#elif defined(__AVX__)
  _mm256_stream_ps(to, (__m256)value);
#else
  _mm_stream_ps(to, (__m128)value);
#endif
}

// round_one<float, kNearestByAddition, true> of a vector.
inline FloatVector round_vector(FloatVector value, const RoundingConstants<float>& c) {
  using F = FloatTraits<float>;
  const WordVector bits = (WordVector)value, sign = bits & F::sign;
  FloatVector a = (FloatVector)(bits & ~F::sign);
  a = a > c.clamp ? FloatVector{} + c.clamp : a;
  WordVector exponent = (WordVector)a & F::exponent;
  exponent = exponent > c.smallest_exponent ? exponent : WordVector{} + c.smallest_exponent;
  const FloatVector big = (FloatVector)(exponent + c.addend);
  return (FloatVector)((WordVector)((a + big) - big) | sign);
}

// n is a multiple of kStreamGroup; `to` starts a cache line. Memory behind x may be prefetched, not read.
constexpr int64_t kPageFloats = 1024, kStreamGroup = 4 * kPageFloats;
inline void stream_rounded(const float* x, float* to, int64_t n, const RoundingConstants<float>& constants) {
  const RoundingConstants<float> c = constants;
  constexpr int64_t kRun = 64;
  for (int64_t group = 0; group < n; group += kStreamGroup) {
    for (int64_t i = group; i < group + kPageFloats; i += kRun) {
      for (int64_t page = i; page < i + kStreamGroup; page += kPageFloats) {
        for (int64_t j = page; j < page + kRun; j += kWidth) {
          FloatVector value;
          __builtin_memcpy(&value, x + j, sizeof value);
          __builtin_prefetch(x + j + 2 * kPageFloats);
          stream_vector(to + j, round_vector(value, c));
        }
      }
    }
  }
  end_stream();
}
#else
constexpr bool kCanStreamRounding = false;
constexpr int64_t kStreamGroup = 4096;
inline void stream_rounded(const float*, float*, int64_t, const RoundingConstants<float>&) {}
#endif

template <class T>
using RoundRun = void (*)(const T*, T*, int64_t, const RoundingConstants<T>&, Random*);

template <class T>
inline RoundRun<T> choose_round(const RoundingSpec& spec) {
  const bool simple = is_simple<T>(spec);
  switch (way_of<T>(spec)) {
    case kByChance: return simple ? round_run<T, kByChance, true> : round_run<T, kByChance, false>;
    case kDown: return round_run<T, kDown, false>;
    case kNearestByBits: return simple ? round_run<T, kNearestByBits, true> : round_run<T, kNearestByBits, false>;
    default: return simple ? round_run<T, kNearestByAddition, true> : round_run<T, kNearestByAddition, false>;
  }
}

}  // namespace
}  // namespace plumb::kernel
