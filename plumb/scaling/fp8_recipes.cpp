#include "plumb/scaling/fp8_recipes.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <limits>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/fp8.h"
#include "plumb/scaling/matmul_parts.h"

namespace plumb {
namespace {

using at::Tensor;
using std::string_view;

constexpr std::array<std::pair<string_view, Fp8Recipe>, 6> kRecipes{{{"tensorwise", Fp8Recipe::Tensorwise},
                                                                     {"rowwise", Fp8Recipe::Rowwise},
                                                                     {"blocks128", Fp8Recipe::Blocks128},
                                                                     {"mxfp8", Fp8Recipe::Mx},
                                                                     {"mxfp8-up", Fp8Recipe::MxUp},
                                                                     {"delayed", Fp8Recipe::Delayed}}};

constexpr double kLeast = 1e-12;    // a largest value counts as no less
constexpr int kExponentBias = 127;  // exponent bias of float32 and of E8M0
constexpr int kFloatMantissa = 23;
constexpr double kLeastNormal = 1.1754943508222875e-38;  // float32's

// Values by line and block: [lines, blocks, length], or of square blocks [lines, side, blocks, side]. Filled up with
// zeros, which change no largest value.
Tensor in_blocks(const Tensor& x, int64_t length, bool square) {
  auto fill = [&](int64_t size) { return (length - size % length) % length; };
  const Tensor full = at::constant_pad_nd(x, {0, fill(x.size(1)), 0, square ? fill(x.size(0)) : 0});
  if (square) return full.view({full.size(0) / length, length, full.size(1) / length, length});
  return full.view({x.size(0), full.size(1) / length, length});
}

// Returns the divisors of the values.
Tensor scales_of(const Tensor& largest, const FPFormat& format, Fp8Recipe recipe) {
  const double top = format.max_absolute_value();
  if (recipe == Fp8Recipe::MxUp) {
    const Tensor exponent = at::clamp(at::ceil(at::log2(largest / top)), -kExponentBias, kExponentBias);
    // The code 0 stands for a factor of one there.
    return at::where(exponent == -kExponentBias, at::ones_like(exponent), at::exp2(exponent));
  }
  if (recipe == Fp8Recipe::Mx) {
    const Tensor bits = at::bitwise_and(at::bitwise_right_shift(largest.view(at::kInt), kFloatMantissa), 255);
    const Tensor exponent = at::clamp(bits - kExponentBias - format.max_exponent(), -kExponentBias, kExponentBias);
    return at::clamp_min(at::exp2(exponent.to(at::kFloat)), kLeastNormal);
  }
  return at::clamp_min(largest.to(at::kDouble), kLeast);
}

Tensor sized(const Tensor& blocks, const Tensor& like, bool square) {
  const Tensor lines = blocks.reshape({square ? blocks.size(0) * blocks.size(1) : blocks.size(0), -1});
  return lines.slice(0, 0, like.size(0)).slice(1, 0, like.size(1)).contiguous();
}

}  // namespace

Fp8Recipe parse_fp8_recipe(string_view text) {
  for (const auto& [name, recipe] : kRecipes) {
    if (name == text) return recipe;
  }
  throw Error(ErrorKind::InvalidArgument, "'" + std::string(text) + "' is no recipe for FP8", "", join(fp8_recipes()));
}

std::vector<std::string> fp8_recipes() {
  std::vector<std::string> names;
  for (const auto& [name, recipe] : kRecipes) names.emplace_back(name);
  return names;
}

ScaledCodes cast_scaled(const Tensor& matrix, const FPFormat& format, Fp8Recipe recipe, int64_t dim, bool weight) {
  if (matrix.dim() != 2 || !at::isFloatingType(matrix.scalar_type()) || matrix.scalar_type() == at::kDouble)
    throw Error(ErrorKind::TensorMismatch,
                "fp8_cast: a matrix of float32, bfloat16 or float16 is cast, not " + shape_text(matrix) + " of " +
                    c10::toString(matrix.scalar_type()),
                "", "convert the model and its inputs to one of these types, or use_fp8 without scale factors");
  if (recipe == Fp8Recipe::Delayed)
    throw Error(ErrorKind::InvalidArgument, "delayed scaling has no cast without a state", "",
                "fp8_delayed_linear, or another recipe");
  if (dim < -2 || dim > 1) bad_shape("fp8_cast", "a matrix has no dimension " + std::to_string(dim) + ".");
  at::NoGradGuard no_grad;
  const bool down = dim == 0 || dim == -2;
  const Tensor x = (down ? matrix.t() : matrix).to(at::kFloat).contiguous();
  const bool mx = recipe == Fp8Recipe::Mx || recipe == Fp8Recipe::MxUp;
  const bool square = recipe == Fp8Recipe::Blocks128 && weight;
  const int64_t whole = std::max<int64_t>(x.size(1), 1);
  const int64_t length = mx ? 32 : recipe == Fp8Recipe::Blocks128 ? 128 : whole;
  Tensor blocks = in_blocks(x, length, square);
  if (blocks.numel() == 0) return {at::empty_like(matrix, at::kByte), at::empty({0}, x.options()), matrix.clone()};
  const Tensor magnitude = blocks.abs();
  const Tensor largest = recipe == Fp8Recipe::Tensorwise ? magnitude.max()
                         : square                        ? magnitude.amax({1, 3}, /*keepdim=*/true)
                                                         : magnitude.amax({2}, /*keepdim=*/true);
  Tensor divisor = scales_of(largest, format, recipe), scaled, scale;
  if (mx) {
    scaled = recipe == Fp8Recipe::MxUp ? blocks * divisor.reciprocal() : blocks / divisor;
    scale = divisor;
  } else {
    Tensor factor = (format.max_absolute_value() / divisor).to(at::kFloat);
    if (recipe == Fp8Recipe::Rowwise) factor = at::exp2(at::floor(at::log2(factor)));
    scaled = blocks * factor;
    scale = factor.reciprocal();
  }
  const Tensor codes = ops::encode(scaled, format.to_string());
  const Tensor values = ops::decode(codes, format.to_string(), at::kFloat) * scale;
  auto back = [&](const Tensor& t) { return down ? sized(t, x, square).t() : sized(t, x, square); };
  return {back(codes), recipe == Fp8Recipe::Tensorwise ? scale : scale.reshape({scale.size(0), -1}),
          back(values).to(matrix.scalar_type())};
}

namespace {

// Returns the values of a cast; the format "none" leaves them as they are.
Tensor cast_values(const Tensor& matrix, string_view format, Fp8Recipe recipe, int64_t dim, bool weight) {
  return format == "none" ? matrix : cast_scaled(matrix, fp8_format(format), recipe, dim, weight).values;
}

// Multiplies casts with scales: takes, of each operand, the dimension summed over and whether it is a weight.
Tensor product(const Tensor& a, string_view format_a, bool weight_a, const Tensor& b, string_view format_b,
               bool weight_b, Fp8Recipe recipe, const OptionalTensor& bias = {}) {
  return ValueProduct()(Factors::Operands, cast_values(a, format_a, recipe, 1, weight_a),
                        cast_values(b, format_b, recipe, 0, weight_b), 1, bias);
}

std::tuple<Tensor, Tensor> fp8_cast(const Tensor& matrix, string_view format, string_view recipe, int64_t dim,
                                    bool weight) {
  auto cast = cast_scaled(matrix, fp8_format(format), parse_fp8_recipe(recipe), dim, weight);
  return {cast.codes, cast.scales};
}

Tensor fp8_scaled_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, string_view recipe,
                         string_view fwd, string_view bwd) {
  linear_rule(input, weight, bias, std::array{0.5, 0.5, 0.5});  // checks sizes
  if (bwd != "none") fp8_format(bwd);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return product(as_rows(input), fwd, false, weight.t(), fwd, true, parse_fp8_recipe(recipe), bias).view(sizes);
}

std::tuple<Tensor, Tensor, Tensor> fp8_scaled_linear_backward(const Tensor& grad, const Tensor& input,
                                                              const Tensor& weight, string_view recipe, string_view fwd,
                                                              string_view bwd, std::array<bool, 3> mask) {
  refuse_second_gradient("fp8_scaled_linear", grad);
  const Fp8Recipe by = parse_fp8_recipe(recipe);
  const Tensor rows = as_rows(grad), inputs = as_rows(input);
  Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = product(rows, bwd, false, weight, fwd, true, by).view(input.sizes());
  if (mask[1]) grad_weight = product(rows.t(), bwd, false, inputs, fwd, false, by);
  if (mask[2]) grad_bias = rows.sum(0);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

const RegisterOperators fp8_recipes_rows{
    {"plumb::", "fp8_scaled_linear", {.contraction = Contraction::linear()}},
    {"plumb::", "fp8_scaled_linear_backward", {.refused = kTrustsSaved}},
    {"plumb::", "fp8_cast"},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m, "fp8_scaled_linear(Tensor input, Tensor weight, Tensor? bias, str recipe, str fwd, str bwd) -> Tensor",
         fp8_scaled_linear, meta_from<linear_sizes>(fp8_scaled_linear), differentiable());
  define_backward<GradientLayout::kInOrder>(
      m,
      "fp8_scaled_linear_backward(Tensor grad, Tensor input, Tensor weight, str recipe, str fwd, str bwd, "
      "bool[3] mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      fp8_scaled_linear_backward);
  define(m,
         "fp8_cast(Tensor matrix, str format, str recipe, int dim=-1, bool weight=False) -> (Tensor codes, Tensor "
         "scales)",
         {at::Tag::nondeterministic_seeded}, fp8_cast);
}

namespace {

using torch::autograd::variable_list;

void check_state(const Tensor& state, const Tensor& like) {
  if (state.dim() == 2 && state.size(0) == 3 && state.size(1) >= 2 && state.scalar_type() == at::kFloat &&
      state.device() == like.device())
    return;
  throw Error(ErrorKind::TensorMismatch,
              "the state of delayed scaling is float32 [3, 1 + length] on " + like.device().str() + ", not " +
                  shape_text(state) + " of " + c10::toString(state.scalar_type()) + " on " + state.device().str(),
              "", "change the model's dtype before use_fp8, and move the whole model");
}

// `row`: a scale and the largest magnitudes behind it.
void enter(const Tensor& row, const Tensor& largest, double top) {
  const Tensor history = row.slice(0, 1), scale = row[0];
  history.copy_(at::cat({largest.view(1), history.slice(0, 0, -1)}));
  const Tensor amax = history.max();
  Tensor next = at::where(at::isfinite(amax).logical_and(amax > 0), top / amax, scale);
  next = next.masked_fill(at::isinf(next), std::numeric_limits<float>::max());
  scale.copy_(next);
}

Tensor multiplied(const Tensor& a, const Tensor& b) { return ValueProduct()(Factors::Operands, a, b, 1); }

struct Forward {
  DelayedCodes input, weight;
  Tensor result;
};

Forward forward_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor& state,
                   string_view fwd, bool training) {
  linear_rule(input, weight, bias, std::array{0.5, 0.5, 0.5});  // checks sizes
  check_state(state, input);
  const FPFormat& format = fp8_format(fwd);
  Forward done{cast_delayed(input, format, state, DelayedRow::Input, training),
               cast_delayed(weight, format, state, DelayedRow::Weight, training), Tensor()};
  done.result = linear_product(done.input.values(format, input.scalar_type()),
                               done.weight.values(format, weight.scalar_type()), bias, {1, 1, 1, 1, 1}, ValueProduct());
  return done;
}

// The products, whose gradient has been cast.
struct DelayedProducts : torch::autograd::Function<DelayedProducts> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const Tensor& state, std::string fwd, bool training) {
    at::AutoDispatchBelowADInplaceOrView below;
    Forward done = forward_of(input, weight, bias, state, fwd, training);
    context->save_for_backward({done.input.codes, done.input.inverse, done.weight.codes, done.weight.inverse});
    context->saved_data["fwd"] = std::move(fwd);
    return done.result;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
    const Tensor& cast = gradients[0];
    variable_list results(6);
    if (!cast.defined()) return results;
    refuse_second_gradient("fp8_delayed_linear", cast);
    const auto saved = context->get_saved_variables();
    const FPFormat& forward = fp8_format(context->saved_data["fwd"].toStringRef());
    const Tensor rows = as_rows(cast);
    if (context->needs_input_grad(0)) {
      auto sizes = saved[0].sizes();
      results[0] = multiplied(rows, DelayedCodes{saved[2], saved[3]}.values(forward, cast.scalar_type())).view(sizes);
    }
    if (context->needs_input_grad(1))
      results[1] = multiplied(rows.t(), as_rows(DelayedCodes{saved[0], saved[1]}.values(forward, cast.scalar_type())));
    return results;
  }
};

// Casts the gradient of the products: a node of its own, as theirs runs twice where a backward is divided, and a cast
// enters the state. The state is written, it is no variable that is saved.
struct DelayedGradient : torch::autograd::Function<DelayedGradient> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& result, const OptionalTensor&,
                        const Tensor& state, std::string bwd, bool training) {
    context->saved_data["state"] = state;
    context->saved_data["bwd"] = std::move(bwd);
    context->saved_data["training"] = training;
    at::AutoDispatchBelowADInplaceOrView below;  // no view to autograd, which may be written to
    return at::alias(result);
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
    const Tensor& grad = gradients[0];
    variable_list results(5);
    if (!grad.defined()) return results;
    refuse_second_gradient("fp8_delayed_linear", grad);
    const FPFormat& format = fp8_format(context->saved_data["bwd"].toStringRef());
    if (context->needs_input_grad(0)) {
      results[0] = cast_delayed(grad, format, context->saved_data["state"].toTensor(), DelayedRow::Gradient,
                                context->saved_data["training"].toBool())
                       .values(format, grad.scalar_type());
    }
    if (context->needs_input_grad(1)) results[1] = as_rows(grad).sum(0);
    return results;
  }
};

Tensor fp8_delayed_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor& state,
                          string_view fwd, string_view bwd, bool training) {
  fp8_format(bwd);
  return forward_of(input, weight, bias, state, fwd, training).result;
}

Tensor fp8_delayed_linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                   const Tensor& state, string_view fwd, string_view bwd, bool training) {
  fp8_format(bwd);
  require_plain_autograd("plumb::fp8_delayed_linear", input);
  const OptionalTensor added = present(bias) ? OptionalTensor(bias->detach()) : bias;
  const Tensor result = DelayedProducts::apply(input, weight, added, state, std::string(fwd), training);
  return DelayedGradient::apply(result, bias, state, std::string(bwd), training);
}

}  // namespace

Tensor delayed_state(int64_t length, at::Device device) {
  if (length < 1)
    throw Error(ErrorKind::InvalidArgument, "a history of " + std::to_string(length) + " largest values", "",
                "give a length of at least 1");
  Tensor state = at::zeros({3, 1 + length}, at::TensorOptions().dtype(at::kFloat).device(device));
  state.select(1, 0).fill_(1);
  return state;
}

Tensor DelayedCodes::values(const FPFormat& format, at::ScalarType dtype) const {
  return (ops::decode(codes, format.to_string(), at::kFloat) * inverse).to(dtype);
}

DelayedCodes cast_delayed(const Tensor& x, const FPFormat& format, const Tensor& state, DelayedRow row, bool update) {
  at::NoGradGuard no_grad;
  const Tensor own = state[static_cast<int64_t>(row)], wide = x.detach().to(at::kFloat), scale = own[0].clone();
  DelayedCodes done{ops::encode(wide * scale, format.to_string()), scale.reciprocal()};
  if (update && x.numel() > 0) enter(own, wide.abs().max(), format.max_absolute_value());
  return done;
}

const RegisterOperators fp8_delayed_rows{
    {"plumb::",
     "fp8_delayed_linear",
     {.writes = {"state"}, .writes_if = "training", .contraction = Contraction::linear()}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "fp8_delayed_linear(Tensor input, Tensor weight, Tensor? bias, Tensor state, str fwd, str bwd, bool training) "
         "-> Tensor",
         {at::Tag::nondeterministic_seeded}, fp8_delayed_linear, meta_from<linear_sizes>(fp8_delayed_linear),
         fp8_delayed_linear_autograd);
}

}  // namespace plumb
