// Floating-point number formats: what values they have, and their names.
//
// A format here is a set of values and a way to round to it. Tensors stay in their own dtype (the carrier); quantise()
// in quantise.h moves each value to one of the format's.
#pragma once

#include <string>
#include <string_view>

namespace plumb {

enum class Rounding {
  Stochastic,  // up or down by chance, so that the expected value is the value
  Nearest,     // to nearest, ties to the even code
  TowardZero,
};

// "stochastic", "nearest", "toward_zero" (and back; "towards_zero" is taken too).
std::string_view to_string(Rounding rounding);
Rounding parse_rounding(std::string_view text);

// Which codes are not finite numbers, and the exponent's bias.
enum class Encoding {
  Plain,   // bias 2^(E-1), every code finite: the family of FPFormat(E, M); E4M3 has max 240, min normal 2^-7
  Ieee,    // bias 2^(E-1)-1, the top exponent is infinity and NaN: fp16, bf16, tf32, e5m2 (OCP OFP8 1.0, 5.2)
  Fn,      // bias 2^(E-1)-1, no infinity, NaN is the all-ones code: e4m3fn, max 448 (OCP OFP8 1.0, 5.1)
  Fnuz,    // bias 2^(E-1), no infinity, no negative zero, NaN is the code of negative zero: e4m3fnuz, e5m2fnuz
  Finite,  // bias 2^(E-1)-1, every code finite: the elements of MXFP6 and MXFP4 (OCP MX 1.0, 5.3)
};

// A scale that a block of neighboring values shares: their elements are the values divided by it.
enum class BlockScale {
  None,
  // 2^(floor(log2(the block's largest)) - the largest element's exponent), within 2^-127..2^127: an E8M0 code
  // (OCP MX 1.0, 5.3.1 and 6.3).
  PowerOfTwo,
  // Largest / largest element, in units of one float for the whole tensor (the tensor's largest / (448 * largest
  // element)), rounded to the nearest e4m3fn: NVFP4.
  E4M3,
};

// A format with exponent_bits (2..8), mantissa_bits (0..23) and one sign bit; of its elements, where blocks share
// scales.
struct FPFormat {
  int exponent_bits = 4;
  int mantissa_bits = 3;
  Rounding rounding = Rounding::Stochastic;
  int srbits = 0;  // random bits of stochastic rounding, 1..23-mantissa_bits; 0 with the other roundings
  Encoding encoding = Encoding::Plain;
  bool saturate = true;  // beyond max_absolute_value: true: +-max; false: infinity, or NaN where there is none
  BlockScale block_scale = BlockScale::None;
  int block_size = 0;  // neighbors along one dimension that share a scale; 0: none do

  // Member of the plain family. srbits 0 means all bits (23 - mantissa_bits). Throws Error(InvalidArgument) for bits
  // out of range and for srbits without stochastic rounding.
  FPFormat(int exponent_bits, int mantissa_bits, Rounding rounding = Rounding::Stochastic, int srbits = 0);
  FPFormat(int exponent_bits, int mantissa_bits, std::string_view rounding, int srbits = 0);

  // Reads what to_string() writes: NAME[-RN|-SR|-SRn|-RZ][-sat|-inf], nearest when nothing is said. NAME is E<e>M<m>
  // (capitals: the plain family) or one of standard_format_names(); "mxfp8" and "mxfp6" stand for mxfp8e4m3 and
  // mxfp6e2m3. Throws Error(InvalidArgument).
  static FPFormat parse(std::string_view text);

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int bias() const;
  int max_exponent() const;  // floor(log2(max_absolute_value))
  int min_exponent() const;  // log2(min_absolute_normal)
  double max_absolute_value() const;
  double min_absolute_normal() const;
  double min_absolute_subnormal() const;

  bool has_blocks() const { return block_scale != BlockScale::None; }
  // The format of the elements alone.
  FPFormat element() const;

  bool has_infinity() const { return encoding == Encoding::Ieee; }
  bool has_negative_zero() const { return encoding != Encoding::Fnuz; }
  bool saturates_by_default() const;  // all but fp16, bf16, tf32 and fp32

  // A copy of the format with another rounding (srbits as in the constructor).
  FPFormat with_rounding(Rounding rounding, int srbits = 0) const;

  // "E4M3", "e4m3fn": no rounding.
  std::string name() const;
  // "E4M3-SR", "e4m3fn-RN", "E5M2-SR8", "fp16-RZ-sat".
  std::string to_string() const;

  bool operator==(const FPFormat&) const = default;

 private:
  FPFormat() = default;
};

// "e4m3fn e5m2 ...": the names that parse() takes beside E<e>M<m>.
std::string standard_format_names();

}  // namespace plumb
