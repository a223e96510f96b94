#include "plumb/scaling/rules_windows.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "plumb/scaling/rules_internal.h"

namespace plumb::rules {
Scales relu() { return {std::sqrt(2 / (1 - 1 / std::numbers::pi)), std::numbers::sqrt2}; }

void count_taps(Taps& taps, int64_t length, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t outputs = (length + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
  int64_t pairs = 0;
  for (int64_t tap = 0; tap < kernel; ++tap) {
    // Output position o reads input o * stride + offset.
    const int64_t offset = tap * dilation - padding;
    if (offset >= length) break;  // the rest of a kernel that reaches beyond the input reads nothing
    const int64_t first = offset < 0 ? (-offset + stride - 1) / stride : 0;
    const int64_t last = std::min(outputs - 1, length > offset ? (length - 1 - offset) / stride : int64_t{-1});
    pairs += std::max<int64_t>(last - first + 1, 0);
  }
  taps.inputs *= length;
  taps.outputs *= std::max<int64_t>(outputs, 0);
  taps.kernel *= kernel;
  taps.pairs *= pairs;
}

Scales convolution_nd(int64_t out_channels, int64_t in_channels_per_group, int64_t groups, const Taps& taps,
                      const std::vector<double>& power) {
  require_powers(power);
  const double pairs = at_least_one(taps.pairs);
  const double fan_in = static_cast<double>(in_channels_per_group) * pairs / at_least_one(taps.outputs);
  const double fan_out =
      static_cast<double>(out_channels) / static_cast<double>(groups) * pairs / at_least_one(taps.inputs);
  const double uses = at_least_one(taps.examples) * pairs / at_least_one(taps.kernel);
  return {1 / std::pow(fan_in, power[0]), 1 / std::pow(fan_out, power[1]), 1 / std::pow(uses, power[2])};
}

Scales transposed_convolution(int64_t in_channels, int64_t out_channels_per_group, int64_t groups, const Taps& taps,
                              const std::vector<double>& power) {
  require_powers(power);
  const double pairs = at_least_one(taps.pairs);
  const double fan_in =
      static_cast<double>(in_channels) / static_cast<double>(groups) * pairs / at_least_one(taps.inputs);
  const double fan_out = static_cast<double>(out_channels_per_group) * pairs / at_least_one(taps.outputs);
  const double uses = at_least_one(taps.examples) * pairs / at_least_one(taps.kernel);
  return {1 / std::pow(fan_in, power[0]), 1 / std::pow(fan_out, power[1]), 1 / std::pow(uses, power[2])};
}

Scales average_pool(const Taps& taps) {
  const double k = at_least_one(taps.kernel), pairs = at_least_one(taps.pairs);
  return {k / std::sqrt(pairs / at_least_one(taps.outputs)), k / std::sqrt(pairs / at_least_one(taps.inputs))};
}

Scales max_pool(const Taps& taps) {
  // The largest of k values has the density k * density * distribution^(k - 1).
  const double k = at_least_one(taps.kernel);
  auto weight = [k](double x) { return k * std::pow(std::erfc(-x / std::numbers::sqrt2) / 2, k - 1); };
  const double mean = normal_mean([&](double x) { return x * weight(x); });
  const double square = normal_mean([&](double x) { return x * x * weight(x); });
  return {1 / std::sqrt(square - mean * mean), std::sqrt(at_least_one(taps.inputs) / at_least_one(taps.outputs))};
}

}  // namespace plumb::rules
