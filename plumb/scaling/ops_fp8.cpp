// fp8_linear, fp8_matmul: products of codes of FP8, forward and in both backward products.
//
// Their arguments are the values, for sizes, types and autograd, and the values' codes, which are multiplied and saved.
// The gradient of the result is rounded to `bwd` once, to codes that both backward products take. So they compute what
// plumb::simulate_format around plumb::linear and plumb::matmul does. The gradient goes to the values as if nothing had
// been rounded (straight through).
#include <torch/library.h>

#include <algorithm>

#include "plumb/numerics/operators.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/fp8.h"
#include "plumb/scaling/matmul_parts.h"

namespace plumb {
namespace {

using at::Tensor;
using std::string_view;

struct CodeProduct {
  const FPFormat& fwd;
  const FPFormat& bwd;
  at::ScalarType dtype;
  Fp8Kernel kernel;

  CodeProduct(string_view forward, string_view backward, at::ScalarType type, string_view who)
      : fwd(fp8_format(forward)), bwd(fp8_format(backward)), dtype(type), kernel(parse_fp8_kernel(who)) {}

  Tensor operator()(Factors which, const Tensor& a, const Tensor& b, double alpha, const OptionalTensor& bias = {},
                    double beta = 1) const {
    const FPFormat& left = which == Factors::GradientAndOperand ? bwd : fwd;
    const FPFormat& right = which == Factors::OperandAndGradient ? bwd : fwd;
    if (!uses_scaled_mm(kernel, a.device(), dtype))
      return ValueProduct()(which, decoded(a, left), decoded(b, right), alpha, bias, beta);
    Tensor out = scaled_mm(a, left, b, right, alpha, dtype);
    return present(bias) ? out.add_(*bias, beta) : out;
  }
  Tensor values(const Tensor& grad) const { return decoded(grad, bwd); }

 private:
  Tensor decoded(const Tensor& codes, const FPFormat& format) const {
    return ops::decode(codes, format.exponent_bits == 4 ? "e4m3fn" : "e5m2", dtype);
  }
};

void check_codes(const char* op, const Tensor& values, const Tensor& codes) {
  if (codes.scalar_type() == at::kByte && codes.sizes() == values.sizes() && at::isFloatingType(values.scalar_type()))
    return;
  bad_shape(op, "codes " + shape_text(codes) + " of " + c10::toString(codes.scalar_type()) + " are not those of " +
                    shape_text(values) + " of " + c10::toString(values.scalar_type()) + ".");
}

Tensor gradient_codes(const char* op, const Tensor& grad, string_view bwd) {
  refuse_second_gradient(op, grad, "use simulate_format");
  return ops::encode(grad, bwd);
}

Tensor fp8_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor& input_codes,
                  const Tensor& weight_codes, string_view fwd, string_view bwd, OptionalName constraint,
                  at::ArrayRef<double> scale_power, OptionalScales scales, string_view kernel) {
  check_codes("fp8_linear", input, input_codes);
  check_codes("fp8_linear", weight, weight_codes);
  const auto s = choose_linear_scales(scales, constraint, linear_rule(input, weight, bias, scale_power));
  const CodeProduct product(fwd, bwd, input.scalar_type(), kernel);
  // torch's linear adds the bias to a finished product where the input is no matrix and does not lie row by row: types
  // of 16 bits round twice then, here as in the simulation of it.
  const bool apart = present(bias) && scales && std::ranges::all_of(*scales, [](double each) { return each == 1; }) &&
                     input_codes.dim() != 2 && !input_codes.is_contiguous();
  if (apart) return linear_product(input_codes, weight_codes, std::nullopt, s, product).add_(*bias);
  return linear_product(input_codes, weight_codes, bias, s, product);
}

std::tuple<Tensor, Tensor, Tensor> fp8_linear_backward(const Tensor& grad, const Tensor& input_codes,
                                                       const Tensor& weight_codes, string_view fwd, string_view bwd,
                                                       OptionalName constraint, at::ArrayRef<double> scale_power,
                                                       OptionalScales scales, string_view kernel,
                                                       std::array<bool, 3> mask) {
  const auto s = choose_linear_scales(scales, constraint, linear_rule(input_codes, weight_codes, {}, scale_power));
  return linear_gradients(gradient_codes("fp8_linear", grad, bwd), input_codes, weight_codes, s, mask,
                          CodeProduct(fwd, bwd, grad.scalar_type(), kernel));
}

Tensor fp8_matmul(const Tensor& left, const Tensor& right, const OptionalTensor& bias, const Tensor& left_codes,
                  const Tensor& right_codes, string_view fwd, string_view bwd, OptionalName constraint,
                  OptionalScales scales, string_view kernel) {
  check_codes("fp8_matmul", left, left_codes);
  check_codes("fp8_matmul", right, right_codes);
  const auto o = matmul_operands(left_codes, right_codes);
  if (present(bias) && (right.dim() != 2 || bias->dim() != 1 || bias->size(0) != right.size(1)))
    bad_shape("fp8_matmul", "bias " + shape_text(*bias) + " does not fit right " + shape_text(right) + ".");
  const auto s = choose_scales("matmul", scales, constraint, 3, matmul_rule(o));
  return matmul_product(o, s[0], CodeProduct(fwd, bwd, left.scalar_type(), kernel), bias);
}

std::tuple<Tensor, Tensor, Tensor> fp8_matmul_backward(const Tensor& grad, const Tensor& left_codes,
                                                       const Tensor& right_codes, string_view fwd, string_view bwd,
                                                       OptionalName constraint, OptionalScales scales,
                                                       string_view kernel, std::array<bool, 3> mask) {
  const auto o = matmul_operands(left_codes, right_codes);
  const auto s = choose_scales("matmul", scales, constraint, 3, matmul_rule(o));
  const CodeProduct product(fwd, bwd, grad.scalar_type(), kernel);
  const Tensor codes = gradient_codes("fp8_matmul", grad, bwd);
  const auto [grad_left, grad_right] =
      matmul_gradients(codes, o, left_codes.sizes(), right_codes.sizes(), s, {mask[0], mask[1]}, product);
  return {grad_left, grad_right, mask[2] ? product.values(as_rows(codes)).sum(0) : Tensor()};
}

Tensor encode_weight_meta(const Tensor& weight, string_view format) {
  fp8_format(format);
  return at::empty_like(weight, weight.options().dtype(at::kByte));
}

}  // namespace

const RegisterOperators ops_fp8_rows{
    {"plumb::", "fp8_linear", {.contraction = Contraction::linear()}},
    {"plumb::", "fp8_matmul", {.contraction = Contraction::product("left", -1, "right", -2)}},
    {"plumb::", "encode_weight"},
    {"plumb::", "fp8_linear_backward fp8_matmul_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "fp8_linear(Tensor input, Tensor weight, Tensor? bias, Tensor input_codes, Tensor weight_codes, str fwd, "
         "str bwd, *, str? constraint=\"to_output_scale\", float[] scale_power=[0.5, 0.5, 0.5], float[]? scales=None, "
         "str kernel=\"auto\") -> Tensor",
         fp8_linear, meta_from<linear_sizes>(fp8_linear), differentiable());
  define_backward<GradientLayout::kInOrder>(
      m,
      "fp8_linear_backward(Tensor grad, Tensor input_codes, Tensor weight_codes, str fwd, str bwd, "
      "str? constraint, float[] scale_power, float[]? scales, str kernel, bool[3] mask) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      fp8_linear_backward);
  define(m,
         "fp8_matmul(Tensor left, Tensor right, Tensor? bias, Tensor left_codes, Tensor right_codes, str fwd, str bwd, "
         "*, str? constraint=\"to_output_scale\", float[]? scales=None, str kernel=\"auto\") -> Tensor",
         fp8_matmul, meta_from<matmul_sizes>(fp8_matmul), differentiable());
  define_backward<GradientLayout::kInOrder>(
      m,
      "fp8_matmul_backward(Tensor grad, Tensor left_codes, Tensor right_codes, str fwd, str bwd, str? constraint, "
      "float[]? scales, str kernel, bool[3] mask) -> (Tensor grad_left, Tensor grad_right, Tensor grad_bias)",
      fp8_matmul_backward);
  // Rounding stochastically it draws.
  define(m, "encode_weight(Tensor weight, str format) -> Tensor", {at::Tag::nondeterministic_seeded}, encode_weight,
         encode_weight_meta, without_history());
}

}  // namespace plumb
