#include "plumb/scaling/functional.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "plumb/core/error.h"
#include "plumb/scaling/elementwise.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules_windows.h"

namespace plumb::functional {
namespace {

// The handle of an operator; looked up once for each place of call.
template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// What goes into an operator for a constraint: its name, or, for a user's function, scales already tied.
struct Resolved {
  std::optional<std::string> name;
  std::vector<double> scales;
  OptionalName name_view() const { return name ? OptionalName(*name) : OptionalName(); }
  OptionalScales scales_view() const { return scales.empty() ? OptionalScales() : OptionalScales(scales); }
};

template <class Rule>
Resolved resolve(const Constraint& constraint, size_t constrained, const Rule& rule) {
  if (!constraint.is_user_function()) return {constraint.name(), {}};
  std::vector<double> scales = rule();
  auto tied = constraint.apply({scales.begin(), scales.begin() + static_cast<int64_t>(constrained)});
  std::copy(tied.begin(), tied.end(), scales.begin());
  return {std::nullopt, scales};
}

int64_t reduction_code(const char* op, const std::string& reduction) {
  if (reduction == "none") return at::Reduction::None;
  if (reduction == "mean") return at::Reduction::Mean;
  if (reduction == "sum") return at::Reduction::Sum;
  throw Error(ErrorKind::InvalidArgument, std::string(op) + ": reduction '" + reduction + "' is not known.", "",
              "mean, sum or none");
}

using LinearOp = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, OptionalName, at::ArrayRef<double>,
                        OptionalScales);

Resolved linear_constraint(const Tensor& input, const Tensor& weight, const Constraint& constraint,
                           const ScalePower& power) {
  return resolve(constraint, 2, [&] {
    static const auto op =
        find_operator<std::vector<double>(const Tensor&, const Tensor&, at::ArrayRef<double>)>("plumb::linear_scales");
    return op.call(input, weight, power);
  });
}

template <class Padding>
using ConvOp = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, at::IntArrayRef, Padding, at::IntArrayRef,
                      int64_t, OptionalName, at::ArrayRef<double>, OptionalScales);

Tensor conv(int n, const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& o) {
  const std::string name = "plumb::conv" + std::to_string(n) + "d";
  auto& dispatcher = c10::Dispatcher::singleton();
  if (const auto* padding = std::get_if<std::string>(&o.padding)) {
    // The kernel's padding does not change what the rule says by more than the edges.
    auto tied = resolve(o.constraint, 2, [&] {
      auto op = dispatcher.findSchemaOrThrow((name + "_scales").c_str(), "")
                    .typed<std::vector<double>(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef,
                                               at::IntArrayRef, int64_t, at::ArrayRef<double>)>();
      std::vector<int64_t> none{0};
      return op.call(input, weight, o.stride, none, o.dilation, o.groups, o.scale_power);
    });
    return dispatcher.findSchemaOrThrow(name.c_str(), "padding")
        .typed<ConvOp<std::string_view>>()
        .call(input, weight, bias, o.stride, *padding, o.dilation, o.groups, tied.name_view(), o.scale_power,
              tied.scales_view());
  }
  const auto& padding = std::get<std::vector<int64_t>>(o.padding);
  auto tied = resolve(o.constraint, 2, [&] {
    return dispatcher.findSchemaOrThrow((name + "_scales").c_str(), "")
        .typed<std::vector<double>(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                                   int64_t, at::ArrayRef<double>)>()
        .call(input, weight, o.stride, padding, o.dilation, o.groups, o.scale_power);
  });
  return dispatcher.findSchemaOrThrow(name.c_str(), "")
      .typed<ConvOp<at::IntArrayRef>>()
      .call(input, weight, bias, o.stride, padding, o.dilation, o.groups, tied.name_view(), o.scale_power,
            tied.scales_view());
}

// What a user's function would tie depends on how windows meet the input, which only the operator counts.
std::optional<std::string> named(const std::string& op, const Constraint& constraint) {
  if (!constraint.is_user_function()) return constraint.name();
  throw Error(ErrorKind::InvalidArgument, op + ": its constraint is one of those with a name, no function", "",
              "gmean, hmean, amean, to_output_scale, to_grad_input_scale, or none");
}

OptionalName view(const std::optional<std::string>& name) { return name ? OptionalName(*name) : OptionalName(); }

Tensor avg_pool(const std::string& rank, const Tensor& input, const PoolOptions& o) {
  const std::string name = "avg_pool" + rank;
  if (o.dilation != std::vector<int64_t>{1}) {
    throw Error(ErrorKind::InvalidArgument, name + ": an average has no dilation", "", "max_pool" + rank);
  }
  const auto constraint = named(name, o.constraint);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("plumb::" + name).c_str(), "")
      .typed<Tensor(const Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool, bool, OptionalName,
                    OptionalScales)>()
      .call(input, o.kernel_size, o.stride, o.padding, o.ceil_mode, o.count_include_pad, view(constraint),
            std::nullopt);
}

Tensor max_pool(const std::string& rank, const Tensor& input, const PoolOptions& o) {
  const std::string name = "max_pool" + rank;
  const auto constraint = named(name, o.constraint);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("plumb::" + name).c_str(), "")
      .typed<Tensor(const Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool,
                    OptionalName, OptionalScales)>()
      .call(input, o.kernel_size, o.stride, o.padding, o.dilation, o.ceil_mode, view(constraint), std::nullopt);
}

Tensor conv_transpose(const std::string& rank, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const ConvTransposeOptions& o) {
  const std::string name = "conv_transpose" + rank;
  const auto constraint = named(name, o.constraint);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("plumb::" + name).c_str(), "")
      .typed<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, at::IntArrayRef, at::IntArrayRef,
                    at::IntArrayRef, int64_t, at::IntArrayRef, OptionalName, at::ArrayRef<double>, OptionalScales)>()
      .call(input, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation, view(constraint),
            o.scale_power, std::nullopt);
}

}  // namespace

Tensor scale_fwd(const Tensor& input, double scale) {
  static const auto op = find_operator<Tensor(const Tensor&, double)>("plumb::scale_fwd");
  return op.call(input, scale);
}

Tensor scale_bwd(const Tensor& input, double scale) {
  static const auto op = find_operator<Tensor(const Tensor&, double)>("plumb::scale_bwd");
  return op.call(input, scale);
}

Tensor gelu(const Tensor& input, double mult, const Constraint& constraint, const std::string& approximate) {
  static const auto op =
      find_operator<Tensor(const Tensor&, std::string_view, double, OptionalName, OptionalScales)>("plumb::gelu");
  auto tied = resolve(constraint, 2, [&] { return rules::gelu(mult); });
  return op.call(input, approximate, mult, tied.name_view(), tied.scales_view());
}

Tensor detail::elementwise(std::string_view name, const Tensor& input, double mult, const Constraint& constraint) {
  const ElementwiseFunction& function = find_elementwise(name);
  const auto op = find_operator<Tensor(const Tensor&, double, OptionalName, OptionalScales)>(
      ("plumb::" + std::string(function.name)).c_str());
  auto tied = resolve(constraint, 2, [&] { return function.rule(mult); });
  return op.call(input, mult, tied.name_view(), tied.scales_view());
}

Tensor silu_glu(const Tensor& input, const Tensor& gate, double mult) {
  static const auto op = find_operator<Tensor(const Tensor&, const Tensor&, double, OptionalScales)>("plumb::silu_glu");
  return op.call(input, gate, mult, std::nullopt);
}

Tensor softmax(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype, const Constraint& constraint,
               double mult) {
  static const auto op = find_operator<Tensor(const Tensor&, int64_t, std::optional<at::ScalarType>, double,
                                              OptionalName, OptionalScales)>("plumb::softmax");
  auto tied = resolve(constraint, 2, [&] {
    return rules::softmax(input.dim() == 0 ? 1 : input.size(at::maybe_wrap_dim(dim, input.dim())), mult);
  });
  return op.call(input, dim, dtype, mult, tied.name_view(), tied.scales_view());
}

Tensor dropout(const Tensor& input, double p, bool training) {
  if (!training) return input;
  static const auto op = find_operator<Tensor(const Tensor&, double, bool)>("plumb::dropout");
  return op.call(input, p, training);
}

Tensor matmul(const Tensor& left, const Tensor& right, const Constraint& constraint) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, OptionalName, OptionalScales)>("plumb::matmul");
  static const auto scales = find_operator<std::vector<double>(const Tensor&, const Tensor&)>("plumb::matmul_scales");
  auto tied = resolve(constraint, 3, [&] { return scales.call(left, right); });
  return op.call(left, right, tied.name_view(), tied.scales_view());
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Constraint& constraint,
              const ScalePower& scale_power) {
  static const auto op = find_operator<LinearOp>("plumb::linear");
  auto tied = linear_constraint(input, weight, constraint, scale_power);
  return op.call(input, weight, bias, tied.name_view(), scale_power, tied.scales_view());
}

Tensor linear_readout(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const Constraint& constraint) {
  static const auto op = find_operator<LinearOp>("plumb::linear_readout");
  constexpr ScalePower power{1.0, 0.5, 0.5};
  auto tied = linear_constraint(input, weight, constraint, power);
  return op.call(input, weight, bias, tied.name_view(), power, tied.scales_view());
}

Tensor conv1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& options) {
  return conv(1, input, weight, bias, options);
}
Tensor conv2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& options) {
  return conv(2, input, weight, bias, options);
}
Tensor conv3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvOptions& options) {
  return conv(3, input, weight, bias, options);
}

Tensor relu(const Tensor& input, const Constraint& constraint) {
  static const auto op = find_operator<Tensor(const Tensor&, OptionalName, OptionalScales)>("plumb::relu");
  auto tied = resolve(constraint, 2, [] { return rules::relu(); });
  return op.call(input, tied.name_view(), tied.scales_view());
}

Tensor avg_pool1d(const Tensor& input, const PoolOptions& options) { return avg_pool("1d", input, options); }
Tensor avg_pool2d(const Tensor& input, const PoolOptions& options) { return avg_pool("2d", input, options); }
Tensor avg_pool3d(const Tensor& input, const PoolOptions& options) { return avg_pool("3d", input, options); }
Tensor max_pool1d(const Tensor& input, const PoolOptions& options) { return max_pool("1d", input, options); }
Tensor max_pool2d(const Tensor& input, const PoolOptions& options) { return max_pool("2d", input, options); }
Tensor max_pool3d(const Tensor& input, const PoolOptions& options) { return max_pool("3d", input, options); }

Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose("1d", input, weight, bias, options);
}
Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose("2d", input, weight, bias, options);
}
Tensor conv_transpose3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose("3d", input, weight, bias, options);
}

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  static const auto op =
      find_operator<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, double, bool)>(
          "plumb::group_norm");
  return op.call(input, num_groups, weight, bias, eps, true);
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                  const OptionalTensor& weight, const OptionalTensor& bias, bool training, double momentum,
                  double eps) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, bool, double, double, bool)>("plumb::batch_norm");
  return op.call(input, weight, bias, running_mean, running_var, training, momentum, eps, true);
}

Tensor layer_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  static const auto op =
      find_operator<Tensor(const Tensor&, at::IntArrayRef, const OptionalTensor&, const OptionalTensor&, double, bool)>(
          "plumb::layer_norm");
  return op.call(input, normalized_shape, weight, bias, eps, true);
}

Tensor rms_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight, double eps) {
  static const auto op =
      find_operator<Tensor(const Tensor&, at::IntArrayRef, const OptionalTensor&, std::optional<double>)>(
          "plumb::rms_norm");
  return op.call(input, normalized_shape, weight, eps);
}

Tensor add(const Tensor& input, const Tensor& other, const Constraint& constraint, const at::Scalar& alpha) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const at::Scalar&, OptionalName, OptionalScales)>(
          "plumb::add");
  static const auto scales = find_operator<std::vector<double>(const Tensor&, const Tensor&)>("plumb::add_scales");
  auto tied = resolve(constraint, 3, [&] { return scales.call(input, other); });
  return op.call(input, other, alpha, tied.name_view(), tied.scales_view());
}

Tensor add(const Tensor& input, const at::Scalar& other) { return at::add(input, other); }

std::tuple<Tensor, Tensor> residual_split(const Tensor& input, double tau) {
  static const auto op = find_operator<std::tuple<Tensor, Tensor>(const Tensor&, double)>("plumb::residual_split");
  return op.call(input, tau);
}

Tensor residual_add(const Tensor& residual, const Tensor& skip, double tau) {
  static const auto op = find_operator<Tensor(const Tensor&, const Tensor&, double)>("plumb::residual_add");
  return op.call(residual, skip, tau);
}

Tensor embedding(const Tensor& indices, const Tensor& weight, std::optional<int64_t> padding_idx,
                 std::optional<double> max_norm, double norm_type) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, c10::SymInt, bool, bool)>("plumb::embedding");
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
  return op.call(weight, indices, padding, false, false);
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal, double mult,
                                    bool enable_gqa) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double, bool,
                           std::optional<double>, bool, double, OptionalScales)>("plumb::scaled_dot_product_attention");
  return op.call(query, key, value, attn_mask, dropout_p, is_causal, std::nullopt, enable_gqa, mult, std::nullopt);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                     const std::string& reduction, double label_smoothing, double mult) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, c10::SymInt, double, double)>(
          "plumb::cross_entropy");
  return op.call(input, target, weight, reduction_code("cross_entropy", reduction), ignore_index, label_smoothing,
                 mult);
}

Tensor mse_loss(const Tensor& input, const Tensor& target, const std::string& reduction) {
  static const auto op = find_operator<Tensor(const Tensor&, const Tensor&, int64_t)>("plumb::mse_loss");
  return op.call(input, target, reduction_code("mse_loss", reduction));
}

}  // namespace plumb::functional
