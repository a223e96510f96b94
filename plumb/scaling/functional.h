// Unit-scaled versions of torch::nn::functional's operators: inputs and incoming gradients of unit variance give
// outputs and gradients of unit variance (as far as the constraint lets them). Each calls the registered operator of
// its name, torch.ops.plumb.*, and so can be captured, exported and differentiated (twice, too).
//
// Types: float32, float64, float16, bfloat16. Shapes that do not fit are errors of the kind TensorMismatch, options
// that do not fit of InvalidArgument and UnknownName. torch's operators refuse the rest with errors of their own.
// Formulas: plumb/scaling/rules.h.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "plumb/scaling/constraint.h"

namespace plumb::functional {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
// Exponents for the scales of output, input gradient, weight and bias gradient.
using ScalePower = std::array<double, 3>;
inline constexpr ScalePower kScalePower{0.5, 0.5, 0.5};

// scale * x forward, gradient untouched; x forward, gradient scaled. Both give a tensor of their own.
Tensor scale_fwd(const Tensor& input, double scale);
Tensor scale_bwd(const Tensor& input, double scale);

Tensor gelu(const Tensor& input, double mult = 1.0, const Constraint& constraint = "to_output_scale",
            const std::string& approximate = "none");
namespace detail {
// plumb::NAME of the functions of each element (rules.h) that take no more arguments than these.
Tensor elementwise(std::string_view name, const Tensor& input, double mult, const Constraint& constraint);
}  // namespace detail
inline Tensor silu(const Tensor& input, double mult = 1.0, const Constraint& constraint = "to_output_scale") {
  return detail::elementwise("silu", input, mult, constraint);
}
inline Tensor tanh(const Tensor& input, double mult = 1.0, const Constraint& constraint = "to_output_scale") {
  return detail::elementwise("tanh", input, mult, constraint);
}
inline Tensor sigmoid(const Tensor& input, double mult = 1.0, const Constraint& constraint = "to_output_scale") {
  return detail::elementwise("sigmoid", input, mult, constraint);
}
// input * silu(gate); both of one shape.
Tensor silu_glu(const Tensor& input, const Tensor& gate, double mult = 1.0);
Tensor softmax(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype = std::nullopt,
               const Constraint& constraint = "to_output_scale", double mult = 1.0);
// 0 <= p <= 1; without `training` the input itself. The mask is drawn by a seed from the CPU's generator and each
// value's place in memory: the same on every device (numerics/dropout_noise.h).
Tensor dropout(const Tensor& input, double p = 0.5, bool training = true);

// Any ranks that torch::matmul takes, with broadcasting.
Tensor matmul(const Tensor& left, const Tensor& right, const Constraint& constraint = "to_output_scale");
// input (..., in), weight (out, in), bias (out).
Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
              const Constraint& constraint = "to_output_scale", const ScalePower& scale_power = kScalePower);
// A network's last layer: output of scale 1 / sqrt(in), so that logits start small at every width (M, table 2).
Tensor linear_readout(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
                      const Constraint& constraint = std::nullopt);

// "same" and "valid" are paddings too. One value stands for every dimension.
using Padding = std::variant<std::vector<int64_t>, std::string>;
struct ConvOptions {
  std::vector<int64_t> stride{1};
  Padding padding = std::vector<int64_t>{0};
  std::vector<int64_t> dilation{1};
  int64_t groups = 1;
  Constraint constraint = "to_output_scale";
  ScalePower scale_power = kScalePower;
};
// input (N, in, length ...) or (in, length ...), weight (out, in / groups, kernel ...), bias (out).
Tensor conv1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
              const ConvOptions& options = {});
Tensor conv2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
              const ConvOptions& options = {});
Tensor conv3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
              const ConvOptions& options = {});

// The mean of relu's, sigmoid's and the largest-value pools' results is not 0; their standard deviation is 1.
Tensor relu(const Tensor& input, const Constraint& constraint = "to_output_scale");

// One value stands for every dimension. The constraints of pools and transposed convolutions go by name.
struct PoolOptions {
  PoolOptions(std::vector<int64_t> kernel_size) : kernel_size(std::move(kernel_size)) {}  // NOLINT
  std::vector<int64_t> kernel_size;
  std::vector<int64_t> stride{};  // empty: the kernel's size
  std::vector<int64_t> padding{0};
  std::vector<int64_t> dilation{1};  // argument of max_pool only
  bool ceil_mode = false;
  bool count_include_pad = true;  // argument of avg_pool only
  Constraint constraint = "to_output_scale";
};
// input (N, channels, length ...) or (channels, length ...).
Tensor avg_pool1d(const Tensor& input, const PoolOptions& options);
Tensor avg_pool2d(const Tensor& input, const PoolOptions& options);
Tensor avg_pool3d(const Tensor& input, const PoolOptions& options);
Tensor max_pool1d(const Tensor& input, const PoolOptions& options);
Tensor max_pool2d(const Tensor& input, const PoolOptions& options);
Tensor max_pool3d(const Tensor& input, const PoolOptions& options);

struct ConvTransposeOptions {
  std::vector<int64_t> stride{1}, padding{0}, output_padding{0}, dilation{1};
  int64_t groups = 1;
  Constraint constraint = "to_output_scale";
  ScalePower scale_power = kScalePower;
};
// weight (in, out / groups, kernel ...), bias (out).
Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
                        const ConvTransposeOptions& options = {});
Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
                        const ConvTransposeOptions& options = {});
Tensor conv_transpose3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias = std::nullopt,
                        const ConvTransposeOptions& options = {});

// input (N, channels, ...). batch_norm with `training` takes the batch's statistics and moves the running ones.
Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight = std::nullopt,
                  const OptionalTensor& bias = std::nullopt, double eps = 1e-5);
Tensor batch_norm(const Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                  const OptionalTensor& weight = std::nullopt, const OptionalTensor& bias = std::nullopt,
                  bool training = false, double momentum = 0.1, double eps = 1e-5);

Tensor layer_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight = std::nullopt,
                  const OptionalTensor& bias = std::nullopt, double eps = 1e-5);
Tensor rms_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight = std::nullopt,
                double eps = 1e-5);

Tensor add(const Tensor& input, const Tensor& other, const Constraint& constraint = "to_output_scale",
           const at::Scalar& alpha = 1);
// A number changes no scale: an ordinary addition.
Tensor add(const Tensor& input, const at::Scalar& other);

// {residual, skip}: around a residual branch whose contribution is tau times the skip's. Close it with residual_add of
// the same tau. Under autograd both are views of the input: write to neither in place.
std::tuple<Tensor, Tensor> residual_split(const Tensor& input, double tau = 1.0);
Tensor residual_add(const Tensor& residual, const Tensor& skip, double tau = 1.0);
template <class Branch>
Tensor residual_apply(Branch&& branch, const Tensor& input, double tau = 1.0) {
  auto [residual, skip] = residual_split(input, tau);
  return residual_add(branch(residual), skip, tau);
}

// indices of any shape, weight (number, size).
Tensor embedding(const Tensor& indices, const Tensor& weight, std::optional<int64_t> padding_idx = std::nullopt,
                 std::optional<double> max_norm = std::nullopt, double norm_type = 2.0);

// (..., length, size); logits are scaled by mult / size. The rule for causal attention holds with is_causal only: a
// mask is not looked into.
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask = std::nullopt, double dropout_p = 0.0,
                                    bool is_causal = false, double mult = 1.0, bool enable_gqa = false);

// input (C), (N, C) or (N, C, d1, ...). The value is torch's cross_entropy of mult * input, for every reduction
// ("mean", "sum", "none"); the gradient is that of the sum, with unit variance.
Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight = std::nullopt,
                     int64_t ignore_index = -100, const std::string& reduction = "mean", double label_smoothing = 0.0,
                     double mult = 1.0);
Tensor mse_loss(const Tensor& input, const Tensor& target, const std::string& reduction = "mean");

}  // namespace plumb::functional
