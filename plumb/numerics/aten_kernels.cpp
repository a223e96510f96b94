#include "plumb/numerics/aten_kernels.h"

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/device_kernels.h"
#include "plumb/numerics/element.h"

namespace plumb::aten_kernels {
namespace {

using at::Tensor;
using kernel::FloatTraits;
using kernel::RoundingConstants;
using kernel::RoundingSpec;

constexpr double kLeastUnit = 0x1p-126;

template <class T>
struct Types;
template <>
struct Types<float> {
  static constexpr at::ScalarType value = at::kFloat, bits = at::kInt;
};
template <>
struct Types<double> {
  static constexpr at::ScalarType value = at::kDouble, bits = at::kLong;
};

// Bit patterns as ATen's signed scalars.
int64_t word(uint32_t bits) { return int32_t(bits); }
int64_t word(uint64_t bits) { return int64_t(bits); }
template <class T>
int64_t word_of(T value) {
  return word(kernel::to_bits(value));
}

// A float's magnitude taken apart: its value is significand times 2^(unit - bias - mantissa).
struct Parts {
  Tensor field, unit, significand;
};

template <class T>
Parts parts_of(const Tensor& magnitude) {
  using F = FloatTraits<T>;
  Parts p;
  p.field = magnitude.bitwise_right_shift(F::mantissa);
  p.unit = p.field.clamp_min(1);
  p.significand = magnitude - (p.unit - 1).bitwise_left_shift(F::mantissa);
  return p;
}

Tensor low_ones(const Tensor& n) { return at::bitwise_left_shift(at::Scalar(1), n) - 1; }

// significand / 2^shift, to nearest even.
Tensor shift_to_nearest(const Tensor& significand, const Tensor& shift) {
  const Tensor gone = low_ones(shift);
  const Tensor odd = significand.bitwise_right_shift(shift).bitwise_and(gone).bitwise_and(1);
  return (significand + gone.bitwise_right_shift(1) + odd).bitwise_right_shift(shift);
}

// Magnitudes, no NaN, to nearest or toward zero; overflow is not looked at.
template <class T>
Tensor round_magnitude(const Tensor& magnitude, const RoundingSpec& spec, const RoundingConstants<T>& c) {
  using F = FloatTraits<T>;
  const auto [field, unit, significand] = parts_of<T>(magnitude);
  const Tensor shift =
      (field.clamp_min(1 - spec.bias + F::bias) - unit + (F::mantissa - spec.mantissa_bits)).clamp(0, F::mantissa + 2);
  Tensor steps = significand.bitwise_right_shift(shift);
  if (spec.mode == RoundingSpec::Nearest) {
    const Tensor gone = low_ones(shift);
    Tensor odd = steps.bitwise_and(gone).bitwise_and(1);
    // With no mantissa bits the last bit of the code is the exponent's.
    if (spec.mantissa_bits == 0)
      odd = odd.bitwise_and(at::where(field > 0, field.bitwise_xor(int64_t(c.parity)), at::ones_like(field)));
    steps = (significand + gone.bitwise_right_shift(1) + odd).bitwise_right_shift(shift);
  }
  const Tensor kept = steps.bitwise_left_shift(shift);
  return (kept + (unit - 1).bitwise_left_shift(F::mantissa)) * (kept != 0);
}

// The same by chance: kernel_round.h's kByChance in integers.
template <class T>
Tensor round_magnitude_by_chance(const Tensor& magnitude, const Tensor& random, const RoundingConstants<T>& c) {
  using F = FloatTraits<T>;
  const Tensor offset = random.bitwise_right_shift(c.random_down)
                            .bitwise_and(int64_t(c.random_keep))
                            .bitwise_left_shift(c.random_up)
                            .add(int64_t(c.random_half))
                            .to(Types<T>::bits);
  const Tensor normal = (magnitude + offset).bitwise_and(~int64_t(c.mask));
  // Below the threshold in units of its last bit.
  const int64_t low = word_of(c.threshold) >> F::mantissa;
  const auto [field, unit, significand] = parts_of<T>(magnitude);
  const Tensor units = shift_to_nearest(significand, (low - unit).clamp(0, F::mantissa + 2));
  const Tensor steps = (units + offset.bitwise_right_shift(c.low_shift)).bitwise_and(~int64_t(c.mask >> c.low_shift));
  Tensor small = steps;  // the bits of subnormal floats, where that is what they are
  if (low > 1) {
    const int64_t down = (F::bias + F::mantissa - low) << F::mantissa;
    small = (steps.to(Types<T>::value).view(Types<T>::bits) - down) * (steps > 0);
  }
  return at::where(magnitude < word_of(c.threshold), small, normal);
}

// x of type T, in memory of its own kind of order; random as random_words(), of x's sizes, where rounding is by chance.
template <class T>
Tensor round_to(const Tensor& x, const RoundingSpec& spec, const Tensor& random = {}) {
  using F = FloatTraits<T>;
  const RoundingConstants<T> c(spec);
  const Tensor bits = x.view(Types<T>::bits);
  Tensor sign = bits.bitwise_and(word(F::sign));
  const Tensor magnitude = bits.bitwise_and(word(kernel::BitsOf<T>(~F::sign)));
  const Tensor bounded = magnitude.clamp_max(word(F::exponent));
  Tensor result = spec.mode == RoundingSpec::Stochastic ? round_magnitude_by_chance<T>(bounded, random, c)
                                                        : round_magnitude<T>(bounded, spec, c);
  const Tensor beyond = spec.mode == RoundingSpec::TowardZero ? bounded == word(F::exponent) : result > word_of(c.max);
  if (spec.mode == RoundingSpec::TowardZero) result = result.clamp_max(word_of(c.max));
  result = at::where(beyond, at::Scalar(word_of(c.overflow)), result);
  if (!spec.negative_zero) sign = sign * (result != 0);
  result = at::where(magnitude > word(F::exponent), bits, result.bitwise_or(sign));
  return result.view(Types<T>::value);
}

// The words of a dense tensor's elements, by their places in memory.
Tensor words_for(const Tensor& x, uint64_t seed) {
  return random_words(x.numel(), seed, x.device()).as_strided(x.sizes(), x.strides());
}

RoundingSpec rounding_of(const Tensor& x, const FPFormat& format) {
  return rounding_spec(format, carrier_of(x.scalar_type(), "quantise"));
}

// x rounded, in the type that is computed in.
Tensor rounded(const Tensor& x, const FPFormat& format, uint64_t seed) {
  const auto spec = rounding_of(x, format);
  const Tensor source = in_memory_order(x);
  const Tensor random = spec.mode == RoundingSpec::Stochastic ? words_for(source, seed) : Tensor();
  if (x.scalar_type() == at::kDouble) return round_to<double>(source, spec, random);
  return round_to<float>(source.to(at::kFloat), spec, random);
}

// Codes of values that are the format's; kernel_codes.h's codes_of in integers.
// `source` has the signs: of a NaN torch's conversion from float16 drops it on some CPUs.
Tensor codes_of(const Tensor& x, const Tensor& source, const kernel::CodeSpec& spec) {
  using F = FloatTraits<float>;
  const Tensor bits = x.to(at::kFloat).view(at::kInt);
  const Tensor magnitude = bits.bitwise_and(word(~F::sign));
  const int64_t sign_bit = int64_t(1) << (spec.bits - 1);
  const Tensor sign = source.signbit().to(at::kInt).mul(sign_bit);
  const Tensor normal = magnitude.bitwise_right_shift(F::mantissa - spec.mantissa_bits) -
                        (int64_t(F::bias - spec.bias) << spec.mantissa_bits);
  const auto [field, unit, significand] = parts_of<float>(magnitude);
  const int64_t smallest = 1 - spec.bias - spec.mantissa_bits + F::bias + F::mantissa;
  const Tensor small = significand.bitwise_right_shift((smallest - unit).clamp(0, F::mantissa + 2));
  Tensor code = at::where(magnitude < word_of(kernel::power_of_two<float>(1 - spec.bias)), small, normal);
  code = at::where(magnitude == word(F::exponent), at::Scalar(spec.infinity_code), code);
  code = code.bitwise_or(spec.negative_zero ? sign : sign * (code != 0));
  const Tensor nan = spec.nan_is_signed ? sign.bitwise_or(spec.nan_code) : at::full_like(sign, spec.nan_code);
  return at::where(magnitude > word(F::exponent), nan, code).to(at::kByte);
}

template <class T>
Tensor exact_power(const Tensor& exponent) {
  using F = FloatTraits<T>;
  const Tensor field = exponent.to(Types<T>::bits) + F::bias;
  const Tensor bits = field.bitwise_left_shift(F::mantissa);
  // Blocks ask for one subnormal alone, 2^-127 of float.
  return at::where(field > 0, bits, at::full_like(bits, int64_t(1) << (F::mantissa - 1))).view(Types<T>::value);
}

// ATen multiplies by the reciprocal of a number on some devices: it divides by a tensor.
Tensor divided(const Tensor& x, double by) { return x / at::full({}, by, x.options()); }

// Magnitudes as bits, NaN counting as zero.
template <class T>
Tensor counted_magnitude(const Tensor& x) {
  using F = FloatTraits<T>;
  const Tensor magnitude = x.view(Types<T>::bits).bitwise_and(word(kernel::BitsOf<T>(~F::sign)));
  return magnitude * (magnitude <= word(F::exponent));
}

// Sizes of the scales of x's blocks.
std::vector<int64_t> scale_sizes(const Tensor& x, const kernel::BlockSpec& block) {
  auto sizes = x.sizes().vec();
  if (sizes.empty()) sizes.push_back(1);
  sizes.back() = (sizes.back() + block.size - 1) / block.size;
  return sizes;
}

// kernel_blocks.h in tensors: rows [R, L] as [R, blocks, size].
template <class T>
Blocks round_blocks_in(const Tensor& x, const RoundingSpec& spec, const kernel::BlockSpec& block, uint64_t seed,
                       const std::optional<kernel::CodeSpec>& code_spec) {
  using F = FloatTraits<T>;
  const int64_t length = x.dim() == 0 ? 1 : x.size(-1), size = block.size, count = (length + size - 1) / size;
  const int64_t rows = x.numel() / length;
  const auto in_blocks = [&](const Tensor& t) {
    return at::constant_pad_nd(t.reshape({rows, length}), {0, count * size - length}).view({rows, count, size});
  };
  const auto back = [&](const Tensor& t) {
    return t.view({rows, count * size}).narrow(1, 0, length).reshape(x.sizes()).contiguous();
  };
  const Tensor wide = in_blocks(x.to(Types<T>::value));
  const Tensor magnitude = counted_magnitude<T>(wide);
  const int64_t limit = word_of(T(block.largest));
  const Tensor largest = magnitude.amax({2}, /*keepdim=*/true).clamp_max(limit);
  Blocks result;
  result.unit = at::ones({}, wide.options());
  Tensor up, small;
  if (block.power_of_two) {
    const Tensor e = (largest.bitwise_right_shift(F::mantissa) - (F::bias + block.element_exponent)).clamp(-127, 127);
    up = exact_power<T>(e);
    small = wide * exact_power<T>(-e);
    result.scales = (e + 127).to(at::kByte);
  } else {
    const Tensor most = largest.amax().view(Types<T>::value);
    result.unit = divided(most, block.element_max * block.scale_max).clamp_min(kLeastUnit);
    const Tensor wanted = divided(largest.view(Types<T>::value), block.element_max) / result.unit;
    const Tensor scale = round_to<T>(wanted, block.scale_rounding);
    up = scale * result.unit;
    small = wide / at::where(up > 0, up, at::Scalar(kInfinity));
    result.scales = codes_of(scale, scale, code_spec_of(FPFormat::parse("e4m3fn")));
  }
  result.scales = result.scales.view(scale_sizes(x, block));
  const bool chance = spec.mode == RoundingSpec::Stochastic;
  const Tensor random = chance ? in_blocks(random_words(x.numel(), seed, x.device())) : Tensor();
  const Tensor elements = round_to<T>(small, spec, random);
  if (code_spec) result.codes = back(codes_of(elements, elements, *code_spec));
  Tensor values = elements * up;
  if (!block.power_of_two) values = values.clamp(-block.largest, block.largest);
  result.values = back(values).to(x.scalar_type());
  return result;
}

}  // namespace

Tensor in_memory_order(const Tensor& x) {
  if (!x.is_neg() && is_dense(x)) return x;
  return at::empty_like(x).copy_(x);
}

Tensor random_words(int64_t n, uint64_t seed, at::Device device) {
  constexpr int64_t low = 0xffffffff;
  const int64_t groups = (n + kernel::kRandomGroup - 1) / kernel::kRandomGroup, lanes = kernel::kRandomGroup / 4;
  const Tensor counter = at::arange(groups * lanes, at::device(device).dtype(at::kLong)).view({groups, lanes});
  Tensor a = counter.bitwise_and(low), b = counter.bitwise_right_shift(32), c = at::zeros_like(a),
         d = at::full_like(a, int64_t(kernel::kPhiloxDomain));
  // High and low half of the product of 32 bits, in steps that fit 63.
  const auto multiply = [](const Tensor& x, int64_t factor, Tensor& high_half, Tensor& low_half) {
    const Tensor high = x * (factor >> 16), part = x * (factor & 0xffff);
    high_half = (high + part.bitwise_right_shift(16)).bitwise_right_shift(16);
    low_half = (high.bitwise_and(0xffff).bitwise_left_shift(16) + part).bitwise_and(low);
  };
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Tensor p, p_low, q, q_low;
    multiply(a, kernel::kPhilox0, p, p_low);
    multiply(c, kernel::kPhilox1, q, q_low);
    a = q.bitwise_xor(b).bitwise_xor(int64_t(key0));
    b = q_low;
    c = p.bitwise_xor(d).bitwise_xor(int64_t(key1));
    d = p_low;
    key0 += kernel::kPhiloxKey0;
    key1 += kernel::kPhiloxKey1;
  }
  return at::stack({a, b, c, d}, 1).view({-1}).narrow(0, 0, n);
}

Tensor quantise(const Tensor& x, const FPFormat& format, uint64_t seed) {
  if (x.numel() == 0) return at::empty_like(x);
  if (const auto* own = device_kernels(x, x.scalar_type())) {
    const Tensor source = in_memory_order(x), result = at::empty_like(source);
    if (own->pass({.x = source, .y = result, .rounding = rounding_of(x, format), .seed = seed})) return result;
  }
  return rounded(x, format, seed).to(x.scalar_type());
}

bool quantise_into(const Tensor& out, const Tensor& x, const FPFormat& format, uint64_t seed) {
  const auto* own = device_kernels(x, x.scalar_type());
  return own && own->pass({.x = x, .y = out, .rounding = rounding_of(x, format), .seed = seed});
}

Tensor quantise_and_gather(const Tensor& x, const FPFormat& format, uint64_t seed, bool histogram, Tensor* before,
                           Tensor* after) {
  if (const auto* own = device_kernels(x, x.scalar_type())) {
    const auto fields = [&](bool wanted) {
      return wanted ? at::empty({kFields + (histogram ? kernel::kHistogramBins : 0)},
                                x.options().dtype(at::kDouble).requires_grad(false))
                    : Tensor();
    };
    const Tensor source = in_memory_order(x), result = at::empty_like(source);
    const PassTask task{.x = source,
                        .y = result,
                        .rounding = rounding_of(x, format),
                        .seed = seed,
                        .histogram = histogram,
                        .before = fields(before),
                        .after = fields(after)};
    if (own->pass(task)) {
      if (before) *before = task.before;
      if (after) *after = task.after;
      return result;
    }
  }
  if (before) *before = gather_metrics(x, histogram);
  const Tensor result = quantise(x, format, seed);
  if (after) *after = gather_metrics(result, histogram);
  return result;
}

void keep(const Tensor& y, double value, uint32_t last, uint64_t seed) {
  if (y.numel() == 0) return;
  if (const auto* own = device_kernels(y, y.scalar_type()); own && own->keep(y, value, last, seed)) return;
  y.copy_(words_for(y, seed).le(int64_t(last))).mul_(value);
}

Tensor encode(const Tensor& x, const FPFormat& format, uint64_t seed) {
  if (x.numel() == 0) return at::empty_like(x, x.options().dtype(at::kByte));
  if (const auto* own = device_kernels(x, x.scalar_type())) {
    const Tensor source = in_memory_order(x), result = at::empty_like(source, x.options().dtype(at::kByte));
    const auto codes = code_spec_of(format);
    if (own->pass({.x = source, .y = result, .rounding = rounding_of(x, format), .codes = &codes, .seed = seed}))
      return result;
  }
  const Tensor source = in_memory_order(x);
  return codes_of(rounded(source, format, seed), source, code_spec_of(format));
}

// As decode_one() in codes.h, in float: it holds every value of a format of at most 8 bits.
Tensor decode(const Tensor& codes, const FPFormat& format, at::ScalarType dtype) {
  using F = FloatTraits<float>;
  if (const auto* own = device_kernels(codes, dtype)) {
    const Tensor source = in_memory_order(codes), result = at::empty_like(source, codes.options().dtype(dtype));
    std::array<float, 256> table;
    for (int code = 0; code < 256; ++code) table[size_t(code)] = float(decode_one(uint8_t(code), format));
    if (own->decode(source, result, table)) return result;
  }
  const auto spec = code_spec_of(format);
  const int64_t sign_bit = int64_t(1) << (spec.bits - 1), least_normal = int64_t(1) << spec.mantissa_bits;
  const Tensor code = in_memory_order(codes).to(at::kInt), magnitude = code.bitwise_and(sign_bit - 1);
  const Tensor sign = code.bitwise_and(sign_bit) != 0;
  const Tensor normal =
      magnitude.bitwise_left_shift(F::mantissa - spec.mantissa_bits) + (int64_t(F::bias - spec.bias) << F::mantissa);
  const float spacing = kernel::power_of_two<float>(1 - spec.bias - spec.mantissa_bits);
  const Tensor small = magnitude.to(at::kFloat) * double(spacing);
  Tensor value = at::where(magnitude < least_normal, small, normal.view(at::kFloat));
  Tensor nan = code >= 2 * sign_bit;
  if (format.has_infinity()) {
    value = at::where(magnitude == spec.infinity_code, at::Scalar(kInfinity), value);
    nan = nan.logical_or(magnitude > spec.infinity_code);
  } else {
    nan = nan.logical_or((spec.nan_is_signed ? magnitude : code) == spec.nan_code);
  }
  return at::where(nan, at::Scalar(kNaN), at::where(sign, -value, value)).to(dtype);
}

Tensor power_of_two(const Tensor& exponent, at::ScalarType dtype) {
  return dtype == at::kDouble ? exact_power<double>(exponent) : exact_power<float>(exponent);
}

Blocks round_blocks(const Tensor& x, const FPFormat& format, uint64_t seed, bool with_codes) {
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  const auto block = block_spec(format, carrier);
  const auto bytes = x.options().dtype(at::kByte);
  if (x.numel() == 0) {
    return {at::empty_like(x), at::empty(x.sizes(), bytes), at::empty(scale_sizes(x, block), bytes),
            at::full({}, block.power_of_two ? 1 : kLeastUnit, x.options().dtype(at::kDouble))};
  }
  const auto spec = rounding_spec(format.element(), computed_in(carrier));
  std::optional<kernel::CodeSpec> codes;
  if (with_codes) codes = code_spec_of(format);
  if (const auto* own = device_kernels(x, x.scalar_type())) {
    const Blocks result{at::empty_like(x), with_codes ? at::empty(x.sizes(), bytes) : Tensor(),
                        at::empty(scale_sizes(x, block), bytes), at::empty({}, x.options().dtype(at::kFloat))};
    if (own->round_blocks({x, result.values, result.codes, result.scales, result.unit, spec, block,
                           codes.value_or(kernel::CodeSpec{}), seed}))
      return result;
  }
  if (carrier == kernel::kFloat64) return round_blocks_in<double>(x, spec, block, seed, codes);
  return round_blocks_in<float>(x, spec, block, seed, codes);
}

// By blocks: the sums of blocks are words of 64 bits, of which the same sum is taken with the key of a block.
Tensor hash(const Tensor& x) {
  constexpr int64_t block = 1024;
  const Tensor dense = x.detach().resolve_conj().resolve_neg().contiguous();
  const auto options = x.options().dtype(at::kLong).requires_grad(false);
  if (x.numel() == 0) return at::zeros({}, options);
  if (const auto* own = device_kernels(dense, x.scalar_type())) {
    const Tensor sum = at::zeros({}, options);
    if (own->hash(dense, sum)) return sum;
  }
  const Tensor flat = dense.reshape({-1});
  const int64_t size = x.element_size();
  Tensor words = size == 1   ? flat.view(at::kByte).to(at::kLong)
                 : size == 2 ? flat.view(at::kShort).to(at::kLong).bitwise_and(0xffff)
                             : flat.view(at::kInt).to(at::kLong).bitwise_and(static_cast<int64_t>(0xffffffff));
  words = words.bitwise_xor(words.bitwise_right_shift(16));
  uint64_t key = kernel::kHashKey;
  while (words.numel() > 1) {
    std::vector<int64_t> powers(block);
    uint64_t power = 1;
    for (int64_t& p : powers) p = static_cast<int64_t>(power), power *= key;
    const int64_t blocks = (words.numel() + block - 1) / block;
    words = at::constant_pad_nd(words, {0, blocks * block - words.numel()}).view({blocks, block});
    words = (words * at::tensor(powers).to(x.device())).sum(1);
    key = power;
  }
  return words.reshape({});
}

}  // namespace plumb::aten_kernels

namespace plumb {

namespace {

auto& registered_kernels() {
  static std::array<std::atomic<const DeviceKernels*>, at::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};
  return kernels;
}

}  // namespace

void register_device_kernels(at::DeviceType kind, const DeviceKernels* kernels) {
  registered_kernels()[size_t(kind)] = kernels;
}

const DeviceKernels* device_kernels(const at::Tensor& x, at::ScalarType values) {
  const bool known = values == at::kFloat || values == at::kHalf || values == at::kBFloat16;
  return known && x.numel() > 0 ? registered_kernels()[size_t(x.device().type())].load() : nullptr;
}

}  // namespace plumb
