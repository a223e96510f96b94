#include "plumb/scaling/functional.h"

#include <ATen/core/Reduction.h>

#include "plumb/core/error.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb::functional {
namespace {

template <OperatorName name, class... Args>
std::vector<double> scales_of(const Args&... args) {
  return call_operator<name, std::vector<double>>(args...);
}

// An operator's arguments for a constraint: its name, or, for a user's function, scales already tied.
struct Resolved {
  std::optional<std::string> name_text;
  std::vector<double> tied;
  OptionalName name() const { return name_text ? OptionalName(*name_text) : OptionalName(); }
  OptionalScales scales() const { return tied.empty() ? OptionalScales() : OptionalScales(tied); }
};

template <class Rule>
Resolved resolve(const Constraint& constraint, size_t constrained, const Rule& rule) {
  if (!constraint.is_user_function()) return {constraint.name(), {}};
  std::vector<double> scales = rule();
  auto tied = constraint.apply({scales.begin(), scales.begin() + static_cast<int64_t>(constrained)});
  std::copy(tied.begin(), tied.end(), scales.begin());
  return {std::nullopt, scales};
}

// A user's function would tie scales that depend on how windows meet the input, which only the operator counts.
Resolved named(const char* op, const Constraint& constraint) {
  if (!constraint.is_user_function()) return {constraint.name(), {}};
  throw Error(ErrorKind::InvalidArgument, std::string(op) + ": its constraint is one of those with a name, no function",
              "", "gmean, hmean, amean, to_output_scale, to_grad_input_scale, or none");
}

int64_t reduction_code(const char* op, const std::string& reduction) {
  if (reduction == "none") return at::Reduction::None;
  if (reduction == "mean") return at::Reduction::Mean;
  if (reduction == "sum") return at::Reduction::Sum;
  throw Error(ErrorKind::InvalidArgument, std::string(op) + ": reduction '" + reduction + "' is not known.", "",
              "mean, sum or none");
}

template <OperatorName op>
Tensor any_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Constraint& constraint,
                  const ScalePower& power) {
  const auto tied = resolve(constraint, 2, [&] { return scales_of<"linear_scales">(input, weight, power); });
  return call_operator<op>(input, weight, bias, tied.name(), power, tied.scales());
}

template <OperatorName op, OperatorName with_named_padding, OperatorName scales>
Tensor conv(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& o) {
  const auto* padding_name = std::get_if<std::string>(&o.padding);
  // A padding with a name changes what the rule says by no more than the edges.
  const auto padding = padding_name ? std::vector<int64_t>{0} : std::get<std::vector<int64_t>>(o.padding);
  const auto tied = resolve(o.constraint, 2, [&] {
    return scales_of<scales>(input, weight, o.stride, padding, o.dilation, o.groups, o.scale_power);
  });
  if (padding_name) {
    return call_operator<with_named_padding>(input, weight, bias, o.stride, *padding_name, o.dilation, o.groups,
                                             tied.name(), o.scale_power, tied.scales());
  }
  return call_operator<op>(input, weight, bias, o.stride, padding, o.dilation, o.groups, tied.name(), o.scale_power,
                           tied.scales());
}

template <OperatorName op>
Tensor avg_pool(const Tensor& input, const PoolOptions& o) {
  if (o.dilation != std::vector<int64_t>{1}) {
    throw Error(ErrorKind::InvalidArgument, std::string(op.text) + ": an average has no dilation", "",
                "the max_pool of as many dimensions");
  }
  return call_operator<op>(input, o.kernel_size, o.stride, o.padding, o.ceil_mode, o.count_include_pad,
                           named(op.text, o.constraint).name(), OptionalScales());
}

template <OperatorName op>
Tensor max_pool(const Tensor& input, const PoolOptions& o) {
  return call_operator<op>(input, o.kernel_size, o.stride, o.padding, o.dilation, o.ceil_mode,
                           named(op.text, o.constraint).name(), OptionalScales());
}

template <OperatorName op>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const ConvTransposeOptions& o) {
  return call_operator<op>(input, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation,
                           named(op.text, o.constraint).name(), o.scale_power, OptionalScales());
}

}  // namespace

Tensor scale_fwd(const Tensor& input, double scale) { return call_operator<"scale_fwd">(input, scale); }
Tensor scale_bwd(const Tensor& input, double scale) { return call_operator<"scale_bwd">(input, scale); }

Tensor gelu(const Tensor& input, double mult, const Constraint& constraint, const std::string& approximate) {
  const auto tied = resolve(constraint, 2, [&] { return rules::gelu(mult); });
  return call_operator<"gelu">(input, approximate, mult, tied.name(), tied.scales());
}

Tensor detail::elementwise(std::string_view name, const Tensor& input, double mult, const Constraint& constraint) {
  const ElementwiseFunction& function = find_elementwise(name);
  const auto tied = resolve(constraint, 2, [&] { return function.rule(mult); });
  return find_plumb_operator<Tensor(const Tensor&, double, OptionalName, OptionalScales)>(function.name)
      .call(input, mult, tied.name(), tied.scales());
}

Tensor silu_glu(const Tensor& input, const Tensor& gate, double mult) {
  return call_operator<"silu_glu">(input, gate, mult, OptionalScales());
}

Tensor softmax(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype, const Constraint& constraint,
               double mult) {
  const auto tied = resolve(constraint, 2, [&] { return scales_of<"softmax_scales">(input, dim, mult); });
  return call_operator<"softmax">(input, dim, dtype, mult, tied.name(), tied.scales());
}

Tensor dropout(const Tensor& input, double p, bool training) {
  return training ? call_operator<"dropout">(input, p, training) : input;
}

Tensor matmul(const Tensor& left, const Tensor& right, const Constraint& constraint) {
  const auto tied = resolve(constraint, 3, [&] { return scales_of<"matmul_scales">(left, right); });
  return call_operator<"matmul">(left, right, tied.name(), tied.scales());
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Constraint& constraint,
              const ScalePower& scale_power) {
  return any_linear<"linear">(input, weight, bias, constraint, scale_power);
}
Tensor linear_readout(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const Constraint& constraint) {
  return any_linear<"linear_readout">(input, weight, bias, constraint, {1.0, 0.5, 0.5});
}

Tensor conv1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& options) {
  return conv<"conv1d", "conv1d.padding", "conv1d_scales">(input, weight, bias, options);
}
Tensor conv2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& options) {
  return conv<"conv2d", "conv2d.padding", "conv2d_scales">(input, weight, bias, options);
}
Tensor conv3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& options) {
  return conv<"conv3d", "conv3d.padding", "conv3d_scales">(input, weight, bias, options);
}

Tensor relu(const Tensor& input, const Constraint& constraint) {
  const auto tied = resolve(constraint, 2, [] { return rules::relu(); });
  return call_operator<"relu">(input, tied.name(), tied.scales());
}

Tensor avg_pool1d(const Tensor& input, const PoolOptions& options) { return avg_pool<"avg_pool1d">(input, options); }
Tensor avg_pool2d(const Tensor& input, const PoolOptions& options) { return avg_pool<"avg_pool2d">(input, options); }
Tensor avg_pool3d(const Tensor& input, const PoolOptions& options) { return avg_pool<"avg_pool3d">(input, options); }
Tensor max_pool1d(const Tensor& input, const PoolOptions& options) { return max_pool<"max_pool1d">(input, options); }
Tensor max_pool2d(const Tensor& input, const PoolOptions& options) { return max_pool<"max_pool2d">(input, options); }
Tensor max_pool3d(const Tensor& input, const PoolOptions& options) { return max_pool<"max_pool3d">(input, options); }

Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose<"conv_transpose1d">(input, weight, bias, options);
}
Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose<"conv_transpose2d">(input, weight, bias, options);
}
Tensor conv_transpose3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose<"conv_transpose3d">(input, weight, bias, options);
}

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  return call_operator<"group_norm">(input, num_groups, weight, bias, eps, true);
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                  const OptionalTensor& weight, const OptionalTensor& bias, bool training, double momentum,
                  double eps) {
  return call_operator<"batch_norm">(input, weight, bias, running_mean, running_var, training, momentum, eps, true);
}

Tensor layer_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  return call_operator<"layer_norm">(input, normalized_shape, weight, bias, eps, true);
}

Tensor rms_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight, double eps) {
  return call_operator<"rms_norm">(input, normalized_shape, weight, std::optional<double>(eps));
}

Tensor add(const Tensor& input, const Tensor& other, const Constraint& constraint, const at::Scalar& alpha) {
  const auto tied = resolve(constraint, 3, [&] { return scales_of<"add_scales">(input, other); });
  return call_operator<"add">(input, other, alpha, tied.name(), tied.scales());
}

Tensor add(const Tensor& input, const at::Scalar& other) { return at::add(input, other); }

std::tuple<Tensor, Tensor> residual_split(const Tensor& input, double tau) {
  return call_operator<"residual_split", std::tuple<Tensor, Tensor>>(input, tau);
}

Tensor residual_add(const Tensor& residual, const Tensor& skip, double tau) {
  return call_operator<"residual_add">(residual, skip, tau);
}

Tensor embedding(const Tensor& indices, const Tensor& weight, std::optional<int64_t> padding_idx,
                 std::optional<double> max_norm, double norm_type) {
  int64_t padding = padding_idx.value_or(-1);
  if (padding_idx) {
    const int64_t rows = weight.size(0);
    if (*padding_idx < -rows || *padding_idx >= rows) {
      throw Error(ErrorKind::InvalidArgument, "embedding: padding_idx " + std::to_string(*padding_idx) +
                                                  " is outside of a table of " + std::to_string(rows) + " rows.");
    }
    if (padding < 0) padding += rows;
  }
  if (max_norm) {
    at::NoGradGuard no_grad;
    auto table = weight;
    at::embedding_renorm_(table, indices.contiguous(), *max_norm, norm_type);
  }
  return call_operator<"embedding">(weight, indices, c10::SymInt(padding), false, false);
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal, double mult,
                                    bool enable_gqa) {
  return call_operator<"scaled_dot_product_attention">(query, key, value, attn_mask, dropout_p, is_causal,
                                                       std::optional<double>(), enable_gqa, mult, OptionalScales());
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                     const std::string& reduction, double label_smoothing, double mult) {
  return call_operator<"cross_entropy">(input, target, weight, reduction_code("cross_entropy", reduction),
                                        c10::SymInt(ignore_index), label_smoothing, mult);
}

Tensor mse_loss(const Tensor& input, const Tensor& target, const std::string& reduction) {
  return call_operator<"mse_loss">(input, target, reduction_code("mse_loss", reduction));
}

}  // namespace plumb::functional
