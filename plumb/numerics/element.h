// The arithmetic of single elements, which the kernels of every CPU level and of CUDA are made of. Plain enough for a
// compiler without a library (nvrtc): it includes the kernels' own types and nothing else.
#pragma once

#include "plumb/numerics/kernels.h"

namespace plumb::kernel {
namespace {

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

// The random number of value i: a word of the Philox4x32-10 call that kernel_base.h describes, which makes four at
// once.
struct RandomWords {
  uint32_t word[4];
};
inline RandomWords random_words(uint64_t seed, uint64_t counter) {
  uint32_t a = uint32_t(counter), b = uint32_t(counter >> 32), c = 0, d = kPhiloxDomain;
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t(kPhilox0) * a, q = uint64_t(kPhilox1) * c;
    a = uint32_t(q >> 32) ^ b ^ key0;
    b = uint32_t(q);
    c = uint32_t(p >> 32) ^ d ^ key1;
    d = uint32_t(p);
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  return {{a, b, c, d}};
}
inline uint32_t random_word(uint64_t seed, uint64_t i) {
  constexpr uint64_t lanes = kRandomGroup / 4;
  return random_words(seed, i / kRandomGroup * lanes + i % lanes).word[i % kRandomGroup / lanes];
}

// Returns the last of the 2^32 words that make up a probability, in steps of 2^-32 and at least one.
inline uint32_t last_word_of(double probability) {
  const double words = probability * 0x1p32 + 0.5;
  return words < 2 ? 0 : words >= 0x1p32 ? 0xffffffff : uint32_t(uint64_t(words) - 1);
}

// --- rounding

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
  Bits smallest_exponent, addend;  // least exponent bits and their increment, for rounding by addition
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

// Rounding by addition: the power of two must exist, and the format's last bit must lie inside its mantissa.
template <class T>
inline Way way_of(const RoundingSpec& spec) {
  if (spec.mode == RoundingSpec::Stochastic) return kByChance;
  if (spec.mode == RoundingSpec::TowardZero) return kDown;
  const bool wide = spec.exponent_bits == 8 && sizeof(T) == 4;
  return !wide && spec.mantissa_bits > 0 && spec.mantissa_bits < 22 ? kNearestByAddition : kNearestByBits;
}
template <class T>
inline bool is_simple(const RoundingSpec& spec) {
  return spec.saturate && spec.negative_zero && !(spec.exponent_bits == 8 && sizeof(T) == 4);
}

// --- codes

struct CodeConstants {
  int down, to_sign;
  uint32_t rebias, magic_bits, sign_bit, zero_sign, nan_sign, nan, infinity;
  float least_normal, magic;

  explicit CodeConstants(const CodeSpec& spec)
      : down(23 - spec.mantissa_bits),
        to_sign(32 - spec.bits),
        rebias(uint32_t(127 - spec.bias) << spec.mantissa_bits),
        sign_bit(uint32_t(1) << (spec.bits - 1)),
        zero_sign(spec.negative_zero ? sign_bit : 0),
        nan_sign(spec.nan_is_signed ? sign_bit : 0),
        nan(uint32_t(spec.nan_code)),
        infinity(uint32_t(spec.infinity_code)),
        least_normal(power_of_two<float>(1 - spec.bias)),
        magic(power_of_two<float>(1 - spec.bias - spec.mantissa_bits + 23)) {
    magic_bits = to_bits(magic);
  }
};

// The code of a value that is the format's. kFinite: it is no NaN, no infinity, and zeros keep their signs.
template <bool kFinite>
inline uint32_t code_of(float value, const CodeConstants& c) {
  const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffffu, sign = bits >> c.to_sign & c.sign_bit;
  const float a = from_bits(magnitude);
  const uint32_t normal = (magnitude >> c.down) - c.rebias, small = to_bits(a + c.magic) - c.magic_bits;
  uint32_t code = a < c.least_normal ? small : normal;
  if constexpr (kFinite) return code | sign;
  code = magnitude == 0x7f800000u ? c.infinity : code;
  const uint32_t signed_code = code | (code == 0 ? sign & c.zero_sign : sign);
  return magnitude > 0x7f800000u ? c.nan | (sign & c.nan_sign) : signed_code;
}

// --- what metrics are of sums

// The first five fields of TensorMetrics (metrics.h).
struct Finished {
  double mean_abs, abs_mean, std, abs_max, abs_min;
};
inline Finished finish(const Partial& p, int64_t numel) {
  const double infinity = __builtin_inf(), nan = __builtin_nan("");
  if (numel == 0 || p.nans > 0) return {nan, nan, nan, nan, nan};
  if (p.positive_infinities > 0 || p.negative_infinities > 0) {
    const bool both = p.positive_infinities > 0 && p.negative_infinities > 0;
    return {infinity, both ? nan : infinity, nan, infinity, p.abs_min};
  }
  const double mean_abs = p.sum_abs / double(numel), mean = p.mean < 0 ? -p.mean : p.mean, apart = mean_abs - mean;
  // For values of one sign both are the same number, gathered in two ways.
  const double abs_mean = (apart < 0 ? -apart : apart) <= 1e-11 * mean_abs ? mean_abs : mean;
  const double m2 = p.m2 > 0 ? p.m2 : 0;
  return {mean_abs, abs_mean, numel > 1 ? __builtin_sqrt(m2 / double(numel - 1)) : nan, p.abs_max, p.abs_min};
}

// --- blocks that share a scale

inline float value_of(float x) { return x; }
inline double value_of(double x) { return x; }
inline float value_of(Half x) { return widen_one(x); }
inline float value_of(BHalf x) { return widen_one(x); }

// The largest magnitude as bits: infinity counts, NaN does not.
template <class T>
inline BitsOf<T> larger_magnitude(BitsOf<T> so_far, T value) {
  using F = FloatTraits<T>;
  BitsOf<T> magnitude = to_bits(value) & ~F::sign;
  magnitude = magnitude > F::exponent ? 0 : magnitude;
  return magnitude > so_far ? magnitude : so_far;
}

// Computes a block's scale from its largest value.
template <class T>
struct Scaler {
  using F = FloatTraits<T>;
  const BlockSpec spec;
  T unit;
  const T element_max;
  const RoundingConstants<T> round_scale;
  BitsOf<T> limit;

  Scaler(const BlockSpec& block, double tensor_scale)
      : spec(block),
        unit(T(tensor_scale)),
        element_max(T(block.element_max)),
        round_scale(block.scale_rounding),
        limit(to_bits(T(block.largest))) {}

  // Returns the scale's code. Values are multiplied by `down` (divided by it if scales are no powers of two) and later
  // by `up`.
  inline uint8_t scale(BitsOf<T> largest, T& down, T& up) const {
    if (largest > limit) largest = limit;
    if (spec.power_of_two) {
      int e = int(largest >> F::mantissa) - F::bias - spec.element_exponent;
      e = e < -127 ? -127 : e;
      e = e > 127 ? 127 : e;
      down = power_of_two<T>(-e);
      up = power_of_two<T>(e);
      return uint8_t(e + 127);
    }
    const T wanted = from_bits(largest) / element_max / unit;
    const T rounded = round_one<T, kNearestByAddition, true>(wanted, 0, round_scale);
    up = rounded * unit;
    down = up > 0 ? up : T(__builtin_inf());
    // e4m3fn's code: 2^-9 is its smallest value.
    if (rounded < T(0.015625)) return uint8_t(int(rounded * T(512)));
    return uint8_t((to_bits(rounded) >> (F::mantissa - 3)) - (BitsOf<T>(F::bias - 7) << 3));
  }
};

// --- hashes (hash.h)

// Makes a sign or an exponent count in low bits too; another word for every word.
inline uint32_t mixed_word(uint32_t word) { return word ^ word >> 16; }

// Returns kHashKey^n.
inline uint64_t hash_power(uint64_t n) {
  uint64_t power = 1;
  for (uint64_t square = kHashKey; n != 0; n >>= 1, square *= square)
    if (n & 1) power *= square;
  return power;
}

}  // namespace
}  // namespace plumb::kernel
