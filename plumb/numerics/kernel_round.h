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

// round_one<float, kNearestByAddition, true> of a vector.
template <class V>
inline V round_vector(V x, const RoundingConstants<float>& c) {
  const hn::DFromV<V> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  const auto clamp = hn::Set(d, c.clamp), magnitude = hn::Abs(x);
  const auto a = hn::IfThenElse(hn::Gt(magnitude, clamp), clamp, magnitude);
  const auto exponent = hn::Max(hn::And(hn::BitCast(bits, a), hn::Set(bits, FloatTraits<float>::exponent)),
                                hn::Set(bits, c.smallest_exponent));
  const auto big = hn::BitCast(d, hn::Add(exponent, hn::Set(bits, c.addend)));
  return hn::CopySignToAbs(hn::Sub(hn::Add(a, big), big), x);
}

// The whole of a large tensor past the cache, four pages side by side, so that several are on their way, in vectors
// that go straight from registers to memory. n is a multiple of kStreamGroup; `to` starts a cache line. Memory behind x
// may be prefetched, not read.
constexpr int64_t kPageFloats = 1024, kStreamGroup = 4 * kPageFloats;
inline void stream_rounded(const float* x, float* to, int64_t n, const RoundingConstants<float>& constants) {
  const RoundingConstants<float> c = constants;
  const hn::ScalableTag<float> d;
  constexpr int64_t kRun = 64;
  for (int64_t group = 0; group < n; group += kStreamGroup)
    for (int64_t i = group; i < group + kPageFloats; i += kRun)
      for (int64_t page = i; page < i + kStreamGroup; page += kPageFloats)
        for (int64_t j = page; j < page + kRun; j += int64_t(hn::MaxLanes(d))) {
          hwy::Prefetch(x + j + 2 * kPageFloats);
          hn::Stream(round_vector(hn::LoadU(d, x + j), c), d, to + j);
        }
}

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
