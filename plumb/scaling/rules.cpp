#include "plumb/scaling/rules.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/table.h"
#include "plumb/operators/operator_facts.h"

namespace plumb::rules {
namespace {

// The standard deviation of relu(x) for unit-normal x is sqrt((1 - 1/pi) / 2): where gelu and silu end for large mult.
const double kReluLimit = std::sqrt(2 / (1 - 1 / std::numbers::pi));

// An empty batch has no gradient to scale: any finite factor does.
double at_least_one(int64_t n) { return static_cast<double>(std::max<int64_t>(n, 1)); }

void require_positive(const char* what, double value) {
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

void require_powers(const std::vector<double>& power) {
  if (power.size() == 3) return;
  throw Error(ErrorKind::InvalidArgument,
              "scale_power needs three exponents (output, input gradient, weight gradient), not " +
                  std::to_string(power.size()) + ".");
}

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// From the moments of the function and of its slope over a unit normal variable.
template <auto Value, auto Slope>
Scales integrated(double mult) {
  require_positive("mult", mult);
  auto rule = [](double m) -> Scales {
    const double mean = normal_mean([m](double x) { return Value(m * x); });
    const double square = normal_mean([m](double x) { return Value(m * x) * Value(m * x); });
    const double slope = normal_mean([m](double x) { return m * Slope(m * x) * (m * Slope(m * x)); });
    return {1 / std::sqrt(square - mean * mean), 1 / std::sqrt(slope)};
  };
  static const Scales plain = rule(1);
  return mult == 1 ? plain : rule(mult);
}

}  // namespace

double logarithmic_interpolation(double alpha, double lower, double upper) {
  return std::exp(alpha * std::log(upper) + (1 - alpha) * std::log(lower));
}

Scales gelu(double mult) {
  require_positive("mult", mult);
  const double alpha = 1 / (1 + 0.25 / (mult * mult));
  return {logarithmic_interpolation(alpha, 2, kReluLimit), logarithmic_interpolation(alpha, 2, std::numbers::sqrt2)};
}

Scales silu(double mult) {
  require_positive("mult", mult);
  const double squared = mult * mult;
  return {logarithmic_interpolation(1 / (1 + 0.25 / squared), 2, kReluLimit),
          logarithmic_interpolation(1 / (1 + 1 / squared), 2, std::numbers::sqrt2)};
}

Scales relu() { return {kReluLimit, std::numbers::sqrt2}; }

double silu_glu(double mult) {
  require_positive("mult", mult);
  return logarithmic_interpolation(1 / (1 + 1 / (mult * mult)), 2, std::numbers::sqrt2);
}

Scales softmax(int64_t dim_size, double mult) {
  require_positive("mult", mult);
  const double alpha = 1 / (1 + 4 / (mult * mult));
  const double n = at_least_one(dim_size);
  // From a flat distribution (small mult) to a one-hot one (large mult).
  return {logarithmic_interpolation(alpha, n, std::sqrt(n)),
          logarithmic_interpolation(alpha, n / mult, std::sqrt(n / mult))};
}

double dropout(double p) { return std::sqrt(1 - p); }

Scales matmul(int64_t left, int64_t inner, int64_t right, int64_t left_repeats, int64_t right_repeats) {
  return {1 / std::sqrt(at_least_one(inner)), 1 / std::sqrt(at_least_one(right * left_repeats)),
          1 / std::sqrt(at_least_one(left * right_repeats))};
}

Scales linear(int64_t fan_in, int64_t fan_out, int64_t batch, const std::vector<double>& power) {
  require_powers(power);
  return {1 / std::pow(at_least_one(fan_in), power[0]), 1 / std::pow(at_least_one(fan_out), power[1]),
          1 / std::pow(at_least_one(batch), power[2])};
}

Scales convolution(int64_t out_channels, int64_t in_channels_per_group, int64_t kernel, int64_t stride, int64_t groups,
                   int64_t batch, const std::vector<double>& power) {
  require_powers(power);
  return {1 / std::pow(at_least_one(in_channels_per_group * kernel), power[0]),
          std::pow(static_cast<double>(stride * groups) / at_least_one(out_channels * kernel), power[1]),
          1 / std::pow(at_least_one(batch), power[2])};
}

Scales add(int64_t input_repeats, int64_t other_repeats, bool scalar) {
  // Adding one number shifts a tensor and leaves its spread alone.
  return {scalar ? 1.0 : 1 / std::numbers::sqrt2, 1 / std::sqrt(at_least_one(input_repeats)),
          1 / std::sqrt(at_least_one(other_repeats))};
}

double norm_grad_weight(int64_t normalized, int64_t numel) {
  return std::sqrt(static_cast<double>(normalized) / at_least_one(numel));
}

double embedding_grad_weight(int64_t num_embeddings, int64_t batch) {
  return std::sqrt(static_cast<double>(num_embeddings) / at_least_one(batch));
}

double attention(int64_t seq_len, int64_t head_size, double mult, double dropout_p, bool is_causal) {
  require_positive("mult", mult);
  const double n = at_least_one(seq_len);
  const double alpha = 1 / (1 + 4 * at_least_one(head_size) / (mult * mult));
  // Flat attention averages n values (causal: row i averages i of them); sharp attention copies one. One position is
  // a copy in both cases, where log(1) would say that nothing comes out.
  const double flat = is_causal && seq_len > 1 ? std::sqrt(std::log(n) / n) : std::sqrt(1 / n);
  return std::sqrt(1 - dropout_p) / logarithmic_interpolation(alpha, flat, 1.0);
}

double cross_entropy_grad(int64_t classes, double label_smoothing) {
  // With one class, or smoothing all the way, the gradient is zero or has no one-hot part: nothing to scale.
  if (classes < 2 || label_smoothing >= 1) return 1;
  const double c = static_cast<double>(classes);
  return c / std::sqrt(c - 1) / (1 - label_smoothing);
}

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
  // That of the convolution, whose input is this one's output.
  Scales scales = convolution_nd(in_channels, out_channels_per_group, groups, taps, {power[1], power[0], power[2]});
  std::swap(scales[0], scales[1]);
  return scales;
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

double mse_grad() { return 1 / std::sqrt(8.0); }

Residual residual(double tau) {
  const double norm = std::sqrt(1 + tau * tau);
  if (!std::isfinite(norm)) {
    throw Error(ErrorKind::InvalidArgument,
                "The weight tau of a residual branch must be a finite number, not " + short_number(tau) + ".", "",
                "give the branch the weight that it has beside its skip: 0.5, say");
  }
  return {tau / norm, 1 / norm};
}

ResidualScalingFn transformer_residual_scaling_rule(double residual_mult, double residual_attn_ratio) {
  const double mlp = residual_mult * std::sqrt(2 / (1 + residual_attn_ratio * residual_attn_ratio));
  const double attn = residual_attn_ratio * mlp;
  return [mlp, attn](int64_t index, int64_t layers) {
    const int64_t attns = (index + 1) / 2, mlps = index / 2;  // before this one
    const auto attn_before = static_cast<double>(attns), mlp_before = static_cast<double>(mlps);
    const double here = index % 2 == 0 ? attn : mlp;
    // Grouped as in Python, whose taus have the same bits.
    return here / std::sqrt(static_cast<double>(layers) / 2 + attn_before * (attn * attn) + mlp_before * (mlp * mlp));
  };
}

}  // namespace plumb::rules

namespace plumb {
namespace {

constexpr ElementwiseFunction kFunctions[] = {
    {"gelu", rules::gelu, nullptr, true},
    {"silu", rules::silu, nullptr, true},
    {"tanh",
     rules::integrated<[](double x) { return std::tanh(x); }, [](double x) { return 1 - std::tanh(x) * std::tanh(x); }>,
     at::tanh},
    {"sigmoid",
     rules::integrated<rules::sigmoid_of, [](double x) { return rules::sigmoid_of(x) * (1 - rules::sigmoid_of(x)); }>,
     at::sigmoid},
};

// The others' rows stand beside their kernels.
[[maybe_unused]] const bool elementwise_rows = [] {
  for (const ElementwiseFunction& function : kFunctions) {
    if (function.torch) RegisterOperators{{"plumb::", function.name}};
  }
  return true;
}();

}  // namespace

std::span<const ElementwiseFunction> elementwise_functions() { return kFunctions; }

const ElementwiseFunction* try_find_elementwise(std::string_view name) {
  if (name.starts_with("plumb::")) name.remove_prefix(7);
  for (const ElementwiseFunction& function : kFunctions) {
    if (function.name == name) return &function;
  }
  return nullptr;
}

const ElementwiseFunction& find_elementwise(std::string_view name) {
  if (const ElementwiseFunction* function = try_find_elementwise(name)) return *function;
  throw Error(ErrorKind::UnknownName,
              "there is no unit-scaled function of each element named '" + std::string(name) + "'", "",
              join(kFunctions, &ElementwiseFunction::name));
}

}  // namespace plumb
