// The slow scalar rounding that tests compare the kernels with: plain double arithmetic, value by value.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "plumb/numerics/format.h"

namespace plumb::reference {

inline constexpr double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

// x rounded to `format` (nearest or toward zero), in a carrier with `carrier_bits` mantissa bits and largest value
// `carrier_max`.
inline double round(double x, const FPFormat& format, int carrier_bits = 23,
                    double carrier_max = std::numeric_limits<float>::max()) {
  if (std::isnan(x)) return x;
  const int m = format.mantissa_bits;
  // The largest value that both have.
  const double lower = std::min(format.max_absolute_value(), carrier_max);
  const double step = std::ldexp(1.0, std::ilogb(lower) - std::min(m, carrier_bits));
  const double max = std::floor(lower / step) * step;
  const double beyond = format.saturate         ? max
                        : format.has_infinity() ? std::numeric_limits<double>::infinity()
                                                : std::numeric_limits<double>::quiet_NaN();
  const double a = std::fabs(x);
  double result;
  if (std::isinf(x)) {
    result = beyond;
  } else {
    const int e = a > 0 ? std::max(std::ilogb(a), format.min_exponent()) : format.min_exponent();
    const double spacing = std::ldexp(1.0, e - m), steps = a / spacing, down = std::floor(steps), rest = steps - down;
    bool odd = std::fmod(down, 2.0) == 1.0;
    if (m == 0 && down == 1.0) odd = (e + format.bias()) % 2 != 0;  // the code is the exponent alone
    const bool up = format.rounding == Rounding::Nearest && (rest > 0.5 || (rest == 0.5 && odd));
    result = (down + (up ? 1 : 0)) * spacing;
    if (result > max) result = format.rounding == Rounding::TowardZero ? max : beyond;
  }
  if (result == 0 && !format.has_negative_zero()) return 0.0;
  return std::copysign(result, x);
}

// True for equal numbers with equal signs of zero; NaN equals NaN.
inline bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

}  // namespace plumb::reference
