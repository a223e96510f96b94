// linear, linear_readout, matmul: the scale is the alpha of the matrix product, forward and in both backward products.
#include <torch/library.h>

#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/matmul_parts.h"
#include "plumb/scaling/rules.h"

namespace plumb {

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

std::vector<double> choose_linear_scales(const OptionalScales& given, const OptionalName& constraint,
                                         std::vector<double> rule) {
  if (given && given->size() == 5) return given->vec();
  auto s = choose_scales("linear", given, constraint, 2, std::move(rule));
  return {s[0], s[1], s[2], s[0], s[2]};
}

Tensor linear_sizes(const Tensor& input, const Tensor& weight) {
  if (input.dim() < 1 || weight.dim() != 2)
    bad_shape("linear", "weight is (out, in), and input has a dimension of in.");
  auto sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return input.new_empty_symint(sizes);
}

// ---- matmul

MatmulOperands matmul_operands(const Tensor& left, const Tensor& right) {
  if (left.dim() == 0 || right.dim() == 0) bad_shape("matmul", "a number has no rows or columns.");
  MatmulOperands o{left.dim() == 1 ? left.unsqueeze(0) : left,
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

std::vector<double> matmul_rule(const MatmulOperands& o) {
  auto repeats = [&](const Tensor& t) { return o.count() / std::max<int64_t>(leading(t.sizes(), 2), 1); };
  return rules::matmul(o.left.size(-2), o.left.size(-1), o.right.size(-1), repeats(o.left), repeats(o.right));
}

Tensor matmul_sizes(const Tensor& left, const Tensor& right) {
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

namespace {

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, OptionalName constraint,
              at::ArrayRef<double> scale_power, OptionalScales scales) {
  const auto s = choose_linear_scales(scales, constraint, linear_rule(input, weight, bias, scale_power));
  return linear_product(input, weight, bias, s, ValueProduct());
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                   OptionalName constraint, at::ArrayRef<double> scale_power,
                                                   OptionalScales scales, std::array<bool, 3> mask) {
  const auto s = choose_linear_scales(scales, constraint, linear_rule(input, weight, {}, scale_power));
  return linear_gradients(grad, input, weight, s, mask, ValueProduct());
}

Tensor matmul(const Tensor& left, const Tensor& right, OptionalName constraint, OptionalScales scales) {
  const auto o = matmul_operands(left, right);
  return matmul_product(o, choose_scales("matmul", scales, constraint, 3, matmul_rule(o))[0], ValueProduct());
}

std::tuple<Tensor, Tensor> matmul_backward(const Tensor& grad, const Tensor& left, const Tensor& right,
                                           OptionalName constraint, OptionalScales scales, std::array<bool, 2> mask) {
  const auto o = matmul_operands(left, right);
  const auto s = choose_scales("matmul", scales, constraint, 3, matmul_rule(o));
  return matmul_gradients(grad, o, left.sizes(), right.sizes(), s, mask, ValueProduct());
}

// ---- the scales before any constraint, for constraints that are functions of the user's

std::vector<double> linear_scales(const Tensor& input, const Tensor& weight, at::ArrayRef<double> scale_power) {
  return linear_rule(input, weight, {}, scale_power);
}
std::vector<double> matmul_scales(const Tensor& left, const Tensor& right) {
  return matmul_rule(matmul_operands(left, right));
}

}  // namespace

const RegisterOperators ops_matmul_rows{
    {"plumb::", "linear linear_readout", {.contraction = Contraction::linear()}},
    {"plumb::", "matmul", {.contraction = Contraction::product("left", -1, "right", -2)}},
    {"plumb::", "linear_scales matmul_scales"},
    {"plumb::", "linear_backward linear_readout_backward matmul_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "linear(Tensor input, Tensor weight, Tensor? bias=None, *, str? constraint=\"to_output_scale\", "
         "float[] scale_power=[0.5, 0.5, 0.5], float[]? scales=None) -> Tensor",
         linear, meta_from<linear_sizes>(linear), differentiable());
  define(m,
         "linear_readout(Tensor input, Tensor weight, Tensor? bias=None, *, str? constraint=None, "
         "float[] scale_power=[1.0, 0.5, 0.5], float[]? scales=None) -> Tensor",
         linear, meta_from<linear_sizes>(linear), differentiable());
  for (const char* name : {"linear", "linear_readout"}) {
    define_backward<GradientLayout::kInOrder>(
        m,
        std::string(name) +
            "_backward(Tensor grad, Tensor input, Tensor weight, str? constraint, float[] scale_power, "
            "float[]? scales, bool[3] mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
        linear_backward);
  }
  define(m, "matmul(Tensor left, Tensor right, *, str? constraint=\"to_output_scale\", float[]? scales=None) -> Tensor",
         matmul, meta_from<matmul_sizes>(matmul), differentiable());
  define_backward<GradientLayout::kInOrder>(
      m,
      "matmul_backward(Tensor grad, Tensor left, Tensor right, str? constraint, float[]? scales, bool[2] mask) -> "
      "(Tensor grad_left, Tensor grad_right)",
      matmul_backward);
  define(m, "linear_scales(Tensor input, Tensor weight, *, float[] scale_power=[0.5, 0.5, 0.5]) -> float[]",
         linear_scales);
  define(m, "matmul_scales(Tensor left, Tensor right) -> float[]", matmul_scales);
}

}  // namespace plumb
