// Rounding to a format. Compiled once per CPU level; see kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

// Ways to round, finer than RoundingSpec::Mode.
enum Way { kNearestByAddition, kNearestByBits, kByChance, kDown };

template <class T>
struct RoundingConstants {
  using Bits = BitsOf<T>;
  Bits mask;       // the mantissa bits that go
  Bits half_down;  // just under half of the last bit that stays
  Bits odd_bit;    // 1, or 0 if nothing goes
  Bits parity;     // with no mantissa bits the last bit of the code is the exponent's, and the biases may differ
  int shift;
  T threshold;                     // below it the spacing is constant
  T spacing;                       // that constant
  T magic;                         // adding it rounds to the spacing
  Bits smallest_exponent, addend;  // of rounding by addition
  T clamp, max, overflow;
  Bits zero_sign;
  // stochastic
  int random_down, random_up, low_shift;
  Bits random_keep, random_half;

  explicit RoundingConstants(const RoundingSpec& spec) {
    using F = FloatTraits<T>;
    int smallest = 1 - spec.bias, low = smallest < 1 - F::bias ? 1 - F::bias : smallest;
    shift = F::mantissa - spec.mantissa_bits;
    mask = (Bits(1) << shift) - 1;
    half_down = mask >> 1;
    odd_bit = shift > 0 ? 1 : 0;
    parity = spec.mantissa_bits == 0 ? Bits((F::bias - spec.bias) & 1) : 0;
    threshold = power_of_two<T>(low);
    spacing = power_of_two<T>(smallest - spec.mantissa_bits);
    magic = power_of_two<T>(smallest - spec.mantissa_bits + F::mantissa);
    smallest_exponent = to_bits(threshold);
    addend = Bits(shift) << F::mantissa;
    max = T(spec.max);
    overflow = T(spec.overflow);
    Bits top = to_bits(max) & F::exponent;
    clamp = spec.saturate ? max : from_bits(Bits(top + (Bits(1) << F::mantissa)));
    zero_sign = spec.negative_zero ? F::sign : 0;

    // One bit less is dropped if float's own subnormals are finer than its normals but the format's are not (8 exponent
    // bits, plain family).
    low_shift = low - smallest;
    int drop = shift < 32 ? shift : 32,
        used = spec.random_bits == 0 || spec.random_bits > drop ? drop : spec.random_bits;
    random_down = drop == 0 ? 31 : 32 - drop;
    random_up = shift - drop;
    Bits unused = (Bits(1) << (drop - used)) - 1;
    random_keep = ((Bits(1) << drop) - 1) & ~unused;
    // Half of the first bit that no random bit reaches: without it few random bits would round down on the whole.
    random_half = shift > used ? Bits(1) << (shift - used - 1) : 0;
  }
};

// kSimple: saturating, has a negative zero, and its spacing changes nowhere within float's subnormals.
template <class T, Way kWay, bool kSimple>
inline T round_one(T value, uint32_t random, const RoundingConstants<T>& c) {
  using F = FloatTraits<T>;
  using Bits = BitsOf<T>;
  Bits bits = to_bits(value), sign = bits & F::sign;
  T a = from_bits(Bits(bits & ~F::sign)), result;
  if constexpr (kWay == kNearestByAddition) {
    // Adding a power of two whose last bit is the last bit that stays rounds to nearest even in hardware.
    a = a > c.clamp ? c.clamp : a;
    Bits exponent = to_bits(a) & F::exponent;
    exponent = exponent > c.smallest_exponent ? exponent : c.smallest_exponent;
    T big = from_bits(Bits(exponent + c.addend));
    result = (a + big) - big;
  } else if constexpr (kWay == kNearestByBits) {
    a = a > c.clamp ? c.clamp : a;
    Bits m = to_bits(a), odd = ((m >> c.shift) ^ c.parity) & c.odd_bit;
    T normal = from_bits(Bits((m + c.half_down + odd) & ~c.mask));
    T small = (a + c.magic) - c.magic;
    result = a < c.threshold ? small : normal;
    result = a != a ? a : result;
  } else if constexpr (kWay == kByChance) {
    a = a > c.clamp ? c.clamp : a;
    Bits offset = ((Bits(random >> c.random_down) & c.random_keep) << c.random_up) + c.random_half;
    T base = a < c.threshold ? c.threshold : T(0);
    T lifted = a + base;
    Bits mask = c.mask;
    if constexpr (!kSimple) {
      offset = a < c.threshold ? offset >> c.low_shift : offset;
      mask = a < c.threshold ? mask >> c.low_shift : mask;
    }
    result = from_bits(Bits((to_bits(lifted) + offset) & ~mask)) - base;
    result = a != a ? a : result;
  } else {
    T normal = from_bits(Bits(to_bits(a) & ~c.mask));
    T small = (a + c.magic) - c.magic;
    small = small > a ? small - c.spacing : small;
    result = a < c.threshold ? small : normal;
    result = result > c.max ? c.max : result;
    result = a > from_bits(Bits(F::exponent - 1)) ? c.overflow : result;
    result = a != a ? a : result;
  }
  if constexpr (kSimple && kWay != kDown) {
    return from_bits(Bits(to_bits(result) | sign));
  } else {
    if constexpr (kWay != kDown) result = result > c.max ? c.overflow : result;
    Bits magnitude = to_bits(result);
    return from_bits(Bits(magnitude | (magnitude == 0 ? sign & c.zero_sign : sign)));
  }
}

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
  bool wide = spec.exponent_bits == 8 && sizeof(T) == 4;
  bool simple = spec.saturate && spec.negative_zero && !wide;
  switch (spec.mode) {
    case RoundingSpec::Stochastic: return simple ? round_run<T, kByChance, true> : round_run<T, kByChance, false>;
    case RoundingSpec::TowardZero: return round_run<T, kDown, false>;
    default:
      // The power of two must exist, and the format's last bit must lie inside its mantissa.
      if (!wide && spec.mantissa_bits > 0 && spec.mantissa_bits < 22)
        return simple ? round_run<T, kNearestByAddition, true> : round_run<T, kNearestByAddition, false>;
      return simple ? round_run<T, kNearestByBits, true> : round_run<T, kNearestByBits, false>;
  }
}

}  // namespace
}  // namespace plumb::kernel
