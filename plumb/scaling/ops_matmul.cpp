// linear, linear_readout, matmul: the scale is the alpha of the matrix product, forward and in both backward products.
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;

// ---- linear

std::vector<double> linear_rule(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                at::ArrayRef<double> scale_power) {
  if (weight.dim() != 2 || input.dim() < 1 || input.size(-1) != weight.size(1)) {
    bad_shape("linear",
              "input " + shape_text(input) + " does not fit weight " + shape_text(weight) + ", which is (out, in).");
  }
  if (present(bias) && (bias->dim() != 1 || bias->size(0) != weight.size(0))) {
    bad_shape("linear", "bias " + shape_text(*bias) + " does not fit weight " + shape_text(weight) + ".");
  }
  return rules::linear(weight.size(1), weight.size(0), leading(input.sizes()), scale_power.vec());
}

// The product's factors (output, gradients of input and weight), then the bias's (output, gradient). Those given may
// leave out the bias's, which are then the output's and the weight's.
std::vector<double> choose_linear_scales(const OptionalScales& given, const OptionalName& constraint,
                                         std::vector<double> rule) {
  if (given && given->size() == 5) return given->vec();
  auto s = choose_scales("linear", given, constraint, 2, std::move(rule));
  return {s[0], s[1], s[2], s[0], s[2]};
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, OptionalName constraint,
              at::ArrayRef<double> scale_power, OptionalScales scales) {
  const auto s = choose_linear_scales(scales, constraint, linear_rule(input, weight, bias, scale_power));
  auto rows = input.dim() == 2 ? input : input.reshape({leading(input.sizes()), input.size(-1)});
  auto out = present(bias) ? at::addmm(*bias, rows, weight.t(), s[3], s[0]) : gemm(rows, weight.t(), s[0]);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return out.view(sizes);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                   OptionalName constraint, at::ArrayRef<double> scale_power,
                                                   OptionalScales scales, std::array<bool, 3> mask) {
  const auto s = choose_linear_scales(scales, constraint, linear_rule(input, weight, {}, scale_power));
  auto rows = grad.dim() == 2 ? grad : grad.reshape({leading(grad.sizes()), grad.size(-1)});
  Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = gemm(rows, weight, s[1]).view(input.sizes());
  if (mask[1]) grad_weight = gemm(rows.t(), input.reshape({rows.size(0), input.size(-1)}), s[2]);
  if (mask[2]) grad_bias = scaled(rows.sum(0), s[4]);
  return {grad_input, grad_weight, grad_bias};
}

Tensor linear_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, OptionalName,
                   at::ArrayRef<double>, OptionalScales) {
  if (input.dim() < 1 || weight.dim() != 2)
    bad_shape("linear", "weight is (out, in), and input has a dimension of in.");
  auto sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return input.new_empty_symint(sizes);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_meta(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        OptionalName, at::ArrayRef<double>, OptionalScales,
                                                        std::array<bool, 3> mask) {
  return {mask[0] ? grad.new_empty_symint(input.sym_sizes()) : Tensor(),
          mask[1] ? grad.new_empty_symint(weight.sym_sizes()) : Tensor(),
          mask[2] ? grad.new_empty_symint({weight.sym_size(0)}) : Tensor()};
}

// ---- matmul

// Both operands as matrices over one batch shape; vectors become a row or a column.
struct Operands {
  Tensor left, right;
  std::vector<int64_t> batch;
  bool left_vector, right_vector;
  bool fold;  // right is a single matrix: left's batch is more rows
  int64_t count() const { return c10::multiply_integers(batch); }
};

Operands matmul_operands(const Tensor& left, const Tensor& right) {
  if (left.dim() == 0 || right.dim() == 0) bad_shape("matmul", "a number has no rows or columns.");
  Operands o{left.dim() == 1 ? left.unsqueeze(0) : left,
             right.dim() == 1 ? right.unsqueeze(1) : right,
             {},
             left.dim() == 1,
             right.dim() == 1,
             right.dim() <= 2};
  if (o.left.size(-1) != o.right.size(-2)) {
    bad_shape("matmul", "left " + shape_text(left) + " does not fit right " + shape_text(right) + ".");
  }
  o.batch = at::infer_size(o.left.sizes().slice(0, o.left.dim() - 2), o.right.sizes().slice(0, o.right.dim() - 2));
  return o;
}

std::vector<double> matmul_rule(const Operands& o) {
  auto repeats = [&](const Tensor& t) { return o.count() / std::max<int64_t>(leading(t.sizes(), 2), 1); };
  return rules::matmul(o.left.size(-2), o.left.size(-1), o.right.size(-1), repeats(o.left), repeats(o.right));
}

Tensor as_batch(const Tensor& t, const std::vector<int64_t>& batch) {
  auto sizes = batch;
  sizes.insert(sizes.end(), {t.size(-2), t.size(-1)});
  return t.expand(sizes).reshape({c10::multiply_integers(batch), t.size(-2), t.size(-1)});
}

Tensor as_rows(const Tensor& t) { return t.reshape({leading(t.sizes()), t.size(-1)}); }

Tensor matmul(const Tensor& left, const Tensor& right, OptionalName constraint, OptionalScales scales) {
  auto o = matmul_operands(left, right);
  const double s = choose_scales("matmul", scales, constraint, 3, matmul_rule(o))[0];
  auto sizes = o.batch;
  if (!o.left_vector) sizes.push_back(o.left.size(-2));
  if (!o.right_vector) sizes.push_back(o.right.size(-1));
  auto out = o.fold ? gemm(as_rows(o.left), o.right, s)
                    : batched_gemm(as_batch(o.left, o.batch), as_batch(o.right, o.batch), s);
  return out.view(sizes);
}

std::tuple<Tensor, Tensor> matmul_backward(const Tensor& grad, const Tensor& left, const Tensor& right,
                                           OptionalName constraint, OptionalScales scales, std::array<bool, 2> mask) {
  auto o = matmul_operands(left, right);
  const auto s = choose_scales("matmul", scales, constraint, 3, matmul_rule(o));
  auto g = grad;
  if (o.left_vector) g = o.right_vector ? g.unsqueeze(-1) : g.unsqueeze(-2);
  if (o.right_vector) g = g.unsqueeze(-1);
  Tensor grad_left, grad_right;
  if (o.fold) {
    auto rows = as_rows(g);
    if (mask[0]) grad_left = gemm(rows, o.right.t(), s[1]).view(left.sizes());
    if (mask[1]) grad_right = gemm(as_rows(o.left).t(), rows, s[2]).view(right.sizes());
    return {grad_left, grad_right};
  }
  auto back = [&](const Tensor& product, const Tensor& operand, const Tensor& original) {
    auto sizes = o.batch;
    sizes.insert(sizes.end(), {operand.size(-2), operand.size(-1)});
    return at::sum_to(product.view(sizes), operand.sizes()).view(original.sizes());
  };
  auto g3 = as_batch(g, o.batch);
  if (mask[0]) grad_left = back(batched_gemm(g3, as_batch(o.right, o.batch).transpose(1, 2), s[1]), o.left, left);
  if (mask[1]) grad_right = back(batched_gemm(as_batch(o.left, o.batch).transpose(1, 2), g3, s[2]), o.right, right);
  return {grad_left, grad_right};
}

Tensor matmul_meta(const Tensor& left, const Tensor& right, OptionalName, OptionalScales) {
  if (left.dim() == 0 || right.dim() == 0) bad_shape("matmul", "a number has no rows or columns.");
  auto l = left.sym_sizes().vec(), r = right.sym_sizes().vec();
  std::vector<c10::SymInt> batch_l, batch_r;
  if (l.size() > 2) batch_l.assign(l.begin(), l.end() - 2);
  if (r.size() > 2) batch_r.assign(r.begin(), r.end() - 2);
  auto sizes = at::infer_size_symint(batch_l, batch_r);
  std::vector<c10::SymInt> out(sizes.begin(), sizes.end());
  if (l.size() > 1) out.push_back(l[l.size() - 2]);
  if (r.size() > 1) out.push_back(r.back());
  return left.new_empty_symint(out);
}

std::tuple<Tensor, Tensor> matmul_backward_meta(const Tensor& grad, const Tensor& left, const Tensor& right,
                                                OptionalName, OptionalScales, std::array<bool, 2> mask) {
  return {mask[0] ? grad.new_empty_symint(left.sym_sizes()) : Tensor(),
          mask[1] ? grad.new_empty_symint(right.sym_sizes()) : Tensor()};
}

// ---- the scales before any constraint, for constraints that are functions of the user's

std::vector<double> linear_scales(const Tensor& input, const Tensor& weight, at::ArrayRef<double> scale_power) {
  return linear_rule(input, weight, {}, scale_power);
}
std::vector<double> matmul_scales(const Tensor& left, const Tensor& right) {
  return matmul_rule(matmul_operands(left, right));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "linear(Tensor input, Tensor weight, Tensor? bias=None, *, str? constraint=\"to_output_scale\", "
         "float[] scale_power=[0.5, 0.5, 0.5], float[]? scales=None) -> Tensor",
         linear, linear_meta, differentiable());
  define(m,
         "linear_readout(Tensor input, Tensor weight, Tensor? bias=None, *, str? constraint=None, "
         "float[] scale_power=[1.0, 0.5, 0.5], float[]? scales=None) -> Tensor",
         linear, linear_meta, differentiable());
  for (const char* name : {"linear", "linear_readout"}) {
    define(m,
           std::string(name) +
               "_backward(Tensor grad, Tensor input, Tensor weight, str? constraint, float[] scale_power, "
               "float[]? scales, bool[3] mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
           linear_backward, linear_backward_meta, differentiable_backward());
  }
  define(m, "matmul(Tensor left, Tensor right, *, str? constraint=\"to_output_scale\", float[]? scales=None) -> Tensor",
         matmul, matmul_meta, differentiable());
  define(m,
         "matmul_backward(Tensor grad, Tensor left, Tensor right, str? constraint, float[]? scales, bool[2] mask) -> "
         "(Tensor grad_left, Tensor grad_right)",
         matmul_backward, matmul_backward_meta, differentiable_backward());
  define(m, "linear_scales(Tensor input, Tensor weight, *, float[] scale_power=[0.5, 0.5, 0.5]) -> float[]",
         linear_scales);
  define(m, "matmul_scales(Tensor left, Tensor right) -> float[]", matmul_scales);
}

}  // namespace plumb
