// layer_norm, rms_norm, embedding: outputs have unit scale by themselves; only parameters' gradients need a factor.
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <limits>

#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;

// Returns whether the last sizes are these. A size that is a symbol may be any.
bool may_end_in(const Tensor& t, at::IntArrayRef shape) {
  if (static_cast<int64_t>(shape.size()) > t.dim()) return false;
  for (size_t i = 1; i <= shape.size(); ++i) {
    const auto size = t.sym_size(-static_cast<int64_t>(i)).maybe_as_int();
    if (size && *size != shape[shape.size() - i]) return false;
  }
  return true;
}

// Throws what bad_shape() throws for an input that does not end in `shape` and a weight of other sizes.
void check_normalized(const char* op, const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight) {
  if (shape.empty() || !may_end_in(input, shape))
    bad_shape(op, "input " + shape_text(input) + " does not end in the normalized shape.");
  if (present(weight) && (weight->dim() != static_cast<int64_t>(shape.size()) || !may_end_in(*weight, shape)))
    bad_shape(op, "weight " + shape_text(*weight) + " does not have the normalized shape.");
}

double grad_scale(const Tensor& input, at::IntArrayRef shape) {
  return rules::norm_grad_weight(c10::multiply_integers(shape), input.numel());
}

// Returns the sizes of a norm's mean and rstd.
c10::SymDimVector statistics_sizes(const Tensor& input, at::IntArrayRef shape) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  for (size_t i = 0; i < shape.size(); ++i) sizes[sizes.size() - 1 - i] = 1;
  return sizes;
}

// ---- layer_norm

std::tuple<Tensor, Tensor, Tensor> native_layer_norm(const Tensor& input, at::IntArrayRef shape,
                                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                                     double eps, bool) {
  check_normalized("layer_norm", input, shape, weight);
  check_normalized("layer_norm", input, shape, bias);
  return at::native_layer_norm(input.contiguous(), shape, weight, bias, eps);
}

Tensor layer_norm(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps, bool cudnn_enable) {
  return std::get<0>(native_layer_norm(input, shape, weight, bias, eps, cudnn_enable));
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       std::array<bool, 3> mask) {
  check_normalized("layer_norm", input, shape, weight);
  check_normalized("layer_norm", input, shape, bias);
  check_gradient("layer_norm", grad, input.sizes());
  const int64_t rows = leading(input.sizes(), shape.size());
  if (mean.numel() != rows || rstd.numel() != rows)
    bad_shape("layer_norm", "mean and rstd need one value for each of " + std::to_string(rows) + " rows.");
  mask[1] = mask[1] && present(weight);
  mask[2] = mask[2] && present(bias);
  auto [grad_input, grad_weight, grad_bias] =
      at::native_layer_norm_backward(grad.contiguous(), input.contiguous(), shape, mean, rstd, weight, bias, mask);
  const double s = grad_scale(input, shape);
  return {grad_input, scaled(grad_weight, s), scaled(grad_bias, s)};
}

// ---- rms_norm

at::ScalarType wide(const Tensor& t) { return at::toOpMathType(t.scalar_type()); }

double rms_eps(const Tensor& input, std::optional<double> eps) {
  if (eps) return *eps;
  return wide(input) == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

std::vector<int64_t> last_dims(at::IntArrayRef shape) {
  std::vector<int64_t> dims;
  for (size_t i = 1; i <= shape.size(); ++i) dims.push_back(-static_cast<int64_t>(i));
  return dims;
}

Tensor inverse_rms(const Tensor& wide_input, at::IntArrayRef shape, double eps) {
  return (at::mean(wide_input * wide_input, last_dims(shape), /*keepdim=*/true) + eps).rsqrt();
}

std::tuple<Tensor, Tensor> native_rms_norm(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight,
                                           std::optional<double> eps) {
  check_normalized("rms_norm", input, shape, weight);
  auto x = input.to(wide(input)).contiguous(input.suggest_memory_format());  // as torch lays its result out
  auto rstd = inverse_rms(x, shape, rms_eps(input, eps));
  auto out = x * rstd;
  if (present(weight)) out.mul_(*weight);
  return {out.to(input.scalar_type()), rstd};
}

Tensor rms_norm(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight, std::optional<double> eps) {
  return std::get<0>(native_rms_norm(input, shape, weight, eps));
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                             const OptionalTensor& weight, std::optional<double> eps,
                                             const Tensor& saved_rstd, std::array<bool, 2> mask) {
  check_normalized("rms_norm", input, shape, weight);
  check_gradient("rms_norm", grad, input.sizes());
  const bool want_weight = mask[1] && present(weight);
  const auto type = wide(input);
  auto x = input.to(type).contiguous();
  auto g = grad.to(type).contiguous();
  // The saved value does not know the input; a gradient of the gradient needs one that does.
  auto rstd = recording(input) ? inverse_rms(x, shape, rms_eps(input, eps)) : saved_rstd;
  auto normal = x * rstd;
  Tensor grad_input, grad_weight;
  if (mask[0]) {
    auto inner = present(weight) ? g * *weight : g;
    grad_input = ((inner - normal * at::mean(inner * normal, last_dims(shape), true)) * rstd).to(input.scalar_type());
  }
  if (want_weight) {
    grad_weight = scaled(at::sum_to(g * normal, shape, true), grad_scale(input, shape)).to(weight->scalar_type());
  }
  return {grad_input, grad_weight};
}

// ---- embedding

Tensor embedding(const Tensor& weight, const Tensor& indices, int64_t padding_idx, bool scale_grad_by_freq,
                 bool sparse) {
  return at::embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse);
}

// torch's kernels of this gradient write where the indices say.
void check_lookup(const Tensor& grad, at::IntArrayRef weight_size, const Tensor& indices) {
  if (weight_size.size() != 2 || weight_size[0] < 0 || weight_size[1] < 0)
    bad_shape("embedding", "the weight's sizes are two, (rows, columns).");
  auto expected = indices.sizes().vec();
  expected.push_back(weight_size[1]);
  check_gradient("embedding", grad, expected);
  if (!at::isIntegralType(indices.scalar_type(), false)) bad_shape("embedding", "the indices are no integers.");
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const auto [least, most] = at::aminmax(indices);
  if (least.item<int64_t>() < 0 || most.item<int64_t>() >= weight_size[0])
    bad_shape("embedding", "an index is outside of the weight's " + std::to_string(weight_size[0]) + " rows.");
}

std::tuple<Tensor> embedding_backward(const Tensor& grad, at::IntArrayRef weight_size, const Tensor& indices,
                                      int64_t padding_idx, bool scale_grad_by_freq, bool sparse,
                                      std::array<bool, 1> mask) {
  if (!mask[0]) return {Tensor()};
  check_lookup(grad, weight_size, indices);
  const int64_t rows = weight_size[0];
  const double s = rules::embedding_grad_weight(rows, indices.numel());
  const bool scale_grad = sparse || static_cast<double>(grad.numel()) < static_cast<double>(rows) * weight_size[1];
  auto result =
      at::embedding_backward(scale_grad ? grad * s : grad, indices, rows, padding_idx, scale_grad_by_freq, sparse);
  return {scale_grad ? result : scaled(result, s)};
}

// ---- Meta

Tensor dense(const Tensor& t) { return at::empty_like(t, {}, at::MemoryFormat::Contiguous); }

std::tuple<Tensor, Tensor, Tensor> native_layer_norm_meta(const Tensor& input, at::IntArrayRef shape,
                                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                                          double, bool) {
  // The statistics have the parameters' type where that is wider (half values, float parameters).
  check_normalized("layer_norm", input, shape, weight);
  check_normalized("layer_norm", input, shape, bias);
  const auto type = present(weight) ? weight->scalar_type() : input.scalar_type();
  auto statistics = [&] { return at::empty_symint(statistics_sizes(input, shape), input.options().dtype(type)); };
  return {dense(input), statistics(), statistics()};
}
Tensor layer_norm_meta(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double, bool) {
  check_normalized("layer_norm", input, shape, weight);
  check_normalized("layer_norm", input, shape, bias);
  return dense(input);
}
Tensor like_rms_norm(const Tensor& input) { return at::empty_like(input, {}, input.suggest_memory_format()); }
std::tuple<Tensor, Tensor> native_rms_norm_meta(const Tensor& input, at::IntArrayRef shape,
                                                const OptionalTensor& weight, std::optional<double>) {
  check_normalized("rms_norm", input, shape, weight);
  return {like_rms_norm(input), at::empty_symint(statistics_sizes(input, shape), input.options().dtype(wide(input)))};
}
Tensor rms_norm_meta(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight, std::optional<double>) {
  check_normalized("rms_norm", input, shape, weight);
  return like_rms_norm(input);
}
Tensor embedding_meta(const Tensor& weight, const Tensor& indices, c10::SymInt, bool, bool) {
  auto sizes = indices.sym_sizes().vec();
  sizes.push_back(weight.sym_size(1));
  return weight.new_empty_symint(sizes);
}

}  // namespace

const RegisterOperators ops_norm_rows{
    {"plumb::", "layer_norm native_layer_norm rms_norm native_rms_norm embedding"},
    {"plumb::", "layer_norm_backward rms_norm_backward embedding_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::string layer =
      "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "bool cudnn_enable=True) -> ";
  define(m, layer + "Tensor", layer_norm, layer_norm_meta, differentiable());
  define(m, "native_" + layer + "(Tensor result, Tensor mean, Tensor rstd)", native_layer_norm, native_layer_norm_meta);
  define_backward<GradientLayout::kInOrder>(
      m,
      "layer_norm_backward(Tensor grad, Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, bool[3] mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      layer_norm_backward);
  const std::string rms = "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None) -> ";
  define(m, rms + "Tensor", rms_norm, rms_norm_meta, differentiable());
  define(m, "native_" + rms + "(Tensor result, Tensor rstd)", native_rms_norm, native_rms_norm_meta);
  define_backward<GradientLayout::kInOrder>(
      m,
      "rms_norm_backward(Tensor grad, Tensor input, int[] normalized_shape, Tensor? weight, float? eps, "
      "Tensor rstd, bool[2] mask) -> (Tensor grad_input, Tensor grad_weight)",
      rms_norm_backward);
  define(m,
         "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, "
         "bool sparse=False) -> Tensor",
         embedding, embedding_meta, differentiable());
  define_backward<GradientLayout::kInOrder>(
      m,
      "embedding_backward(Tensor grad, SymInt[] weight_size, Tensor indices, SymInt padding_idx, "
      "bool scale_grad_by_freq, bool sparse, bool[1] mask) -> (Tensor grad_weight)",
      embedding_backward);
}

}  // namespace plumb
