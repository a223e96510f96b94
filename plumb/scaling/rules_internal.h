// Checks of the rules' arguments, and an integral. For files of rules only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "plumb/core/error.h"

namespace plumb::rules {

// An empty batch has no gradient to scale: any finite factor does.
inline double at_least_one(int64_t n) { return static_cast<double>(std::max<int64_t>(n, 1)); }

inline void require_positive(const char* what, double value) {
  if (value > 0 && std::isfinite(value)) return;
  throw Error(ErrorKind::InvalidArgument,
              std::string(what) + " must be a positive number, not " + std::to_string(value) + ".");
}

// Returns the mean of f over a unit normal variable. The trapezoid rule is exact to rounding for smooth functions.
template <class F>
double normal_mean(const F& f) {
  constexpr int kSteps = 400;
  constexpr double kWidth = 9;
  double sum = 0;
  for (int i = -kSteps; i <= kSteps; ++i) {
    const double x = kWidth * i / kSteps;
    sum += f(x) * std::exp(-x * x / 2);
  }
  return sum * kWidth / kSteps / std::sqrt(2 * std::numbers::pi);
}

inline void require_powers(const std::vector<double>& power) {
  if (power.size() == 3) return;
  throw Error(ErrorKind::InvalidArgument,
              "scale_power needs three exponents (output, input gradient, weight gradient), not " +
                  std::to_string(power.size()) + ".");
}

}  // namespace plumb::rules
