// gelu, silu, silu_glu, softmax, dropout.
#include <torch/library.h>

#include "plumb/core/error.h"
#include "plumb/numerics/dropout_noise.h"
#include "plumb/numerics/quantise.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/pointwise/pointwise.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;

Tensor times(const Tensor& t, double s) { return s == 1 ? t : at::mul(t, s); }

// Torch refuses other words.
bool is_program(std::string_view approximate) { return approximate == "none" || approximate == "tanh"; }

PointwiseProgram gelu_program(std::string_view approximate, double mult, double forward, double backward) {
  const auto kind = approximate == "tanh" ? PointwiseKind::GeluTanh : PointwiseKind::Gelu;
  return scaled_step(kind, mult, forward / mult, backward);
}

// x * sigmoid(mult * x) is silu(mult * x) / mult.
PointwiseProgram silu_program(double mult, double forward, double backward) {
  return scaled_step(PointwiseKind::Silu, mult, forward / mult, backward);
}

// input * silu(gate), one factor throughout.
PointwiseProgram glu_program(double mult, double s) {
  using Arg = PointwiseArg;
  PointwiseProgram program;
  program.num_inputs = 2;
  program.steps.push_back({PointwiseKind::Scale, {Arg::Input, 0}, {}, 1, s / mult});
  program.steps.push_back({PointwiseKind::Scale, {Arg::Input, 1}, {}, mult, s});
  program.steps.push_back({PointwiseKind::Silu, {Arg::Step, 1}, {}});
  program.steps.push_back({PointwiseKind::Mul, {Arg::Step, 0}, {Arg::Step, 2}});
  program.steps.push_back({PointwiseKind::Scale, {Arg::Step, 3}, {}, s / mult, 1});
  return program;
}

// ---- gelu: gelu(mult * x) / mult, whose slope is gelu'(mult * x)

Tensor gelu(const Tensor& input, std::string_view approximate, double mult, OptionalName constraint,
            OptionalScales scales) {
  const double s = choose_scales("gelu", scales, constraint, 2, rules::gelu(mult))[0];
  if (is_program(approximate) && (fuses_pointwise(input) || plain(input))) {
    if (auto fused = fused_pointwise(gelu_program(approximate, mult, s, 1), input); fused.defined()) return fused;
  }
  auto out = at::empty_like(input);
  at::gelu_out(out, times(input, mult), approximate);
  return scaled(out, s / mult);
}

std::tuple<Tensor> gelu_backward(const Tensor& grad, const Tensor& input, std::string_view approximate, double mult,
                                 OptionalName constraint, OptionalScales scales, std::array<bool, 1> mask) {
  if (!mask[0]) return {Tensor()};
  check_gradient("gelu", grad, input.sizes());
  const double s = choose_scales("gelu", scales, constraint, 2, rules::gelu(mult))[1];
  if (recording(grad) || recording(input)) return {at::gelu_backward(grad, times(input, mult), approximate) * s};
  if (is_program(approximate) && (fuses_pointwise(input) || (plain(input) && plain(grad)))) {
    auto fused = fused_pointwise_backward(gelu_program(approximate, mult, 1, s), grad, input, {true});
    if (fused[0].defined()) return {fused[0]};
  }
  auto out = at::empty_like(input);
  at::gelu_backward_out(out, grad, times(input, mult), approximate);
  return {out.mul_(s)};
}

// ---- silu: x * sigmoid(mult * x)

Tensor silu_unscaled(const Tensor& x, double mult) { return mult == 1 ? at::silu(x) : x * at::sigmoid(x * mult); }

// Returns the slope: sigma + mult x sigma (1 - sigma), sigma = sigmoid(mult x).
Tensor silu_slope(const Tensor& x, double mult) {
  auto sigma = at::sigmoid(times(x, mult));
  return sigma * (1 + x * (1 - sigma) * mult);
}

Tensor silu_backward_unscaled(const Tensor& grad, const Tensor& x, double mult) {
  // torch's silu_backward has no derivative of its own.
  const bool watched = recording(grad) || recording(x);
  return mult == 1 && !watched ? at::silu_backward(grad, x) : grad * silu_slope(x, mult);
}

Tensor like(const Tensor& value, const Tensor& layout) {
  if (recording(value) || value.strides() == layout.strides()) return value;
  return at::empty_like(layout).copy_(value);
}

Tensor silu(const Tensor& input, double mult, OptionalName constraint, OptionalScales scales) {
  const double s = choose_scales("silu", scales, constraint, 2, rules::silu(mult))[0];
  if (mult != 0 && fuses_pointwise(input)) {
    if (auto fused = fused_pointwise(silu_program(mult, s, 1), input); fused.defined()) return fused;
  }
  return scaled(like(silu_unscaled(input, mult), input), s);
}

std::tuple<Tensor> silu_backward(const Tensor& grad, const Tensor& input, double mult, OptionalName constraint,
                                 OptionalScales scales, std::array<bool, 1> mask) {
  if (!mask[0]) return {Tensor()};
  check_gradient("silu", grad, input.sizes());
  const double s = choose_scales("silu", scales, constraint, 2, rules::silu(mult))[1];
  if (mult != 0 && fuses_pointwise(input) && !recording(grad) && !recording(input)) {
    auto fused = fused_pointwise_backward(silu_program(mult, 1, s), grad, input, {true});
    if (fused[0].defined()) return {fused[0]};
  }
  return {scaled(like(silu_backward_unscaled(grad, input, mult), input), s)};
}

// ---- silu_glu: input * silu(gate), one factor throughout

double glu_scale(double mult, const OptionalScales& scales) {
  return choose_scales("silu_glu", scales, std::nullopt, 0, {rules::silu_glu(mult)})[0];
}

void check_glu(const Tensor& input, const Tensor& gate) {
  if (input.sizes() == gate.sizes()) return;
  bad_shape("silu_glu", "input " + shape_text(input) + " and gate " + shape_text(gate) + " must have one shape.");
}

Tensor silu_glu(const Tensor& input, const Tensor& gate, double mult, OptionalScales scales) {
  check_glu(input, gate);
  const double s = glu_scale(mult, scales);
  if (mult != 0 && fuses_pointwise(input)) {
    if (auto fused = fused_pointwise(glu_program(mult, s), {input, gate}); fused.defined()) return fused;
  }
  return scaled(like(input * silu_unscaled(gate, mult), input), s);
}

std::tuple<Tensor, Tensor> silu_glu_backward(const Tensor& grad, const Tensor& input, const Tensor& gate, double mult,
                                             OptionalScales scales, std::array<bool, 2> mask) {
  check_glu(input, gate);
  check_gradient("silu_glu", grad, input.sizes());
  const double s = glu_scale(mult, scales);
  if (mult != 0 && fuses_pointwise(input) && (mask[0] || mask[1]) && !recording(grad) && !recording(input) &&
      !recording(gate)) {
    auto fused = fused_pointwise_backward(glu_program(mult, s), grad, {input, gate}, {mask[0], mask[1]});
    if (fused[0].defined() || fused[1].defined()) return {fused[0], fused[1]};
  }
  Tensor grad_input, grad_gate;
  if (mask[0]) grad_input = scaled(like(grad * silu_unscaled(gate, mult), input), s);
  if (mask[1]) grad_gate = scaled(like(silu_backward_unscaled(grad * input, gate, mult), gate), s);
  return {grad_input, grad_gate};
}

// ---- softmax

std::vector<double> softmax_rule(const Tensor& input, int64_t dim, double mult) {
  if (input.dim() == 0) return rules::softmax(1, mult);
  return rules::softmax(input.size(at::maybe_wrap_dim(dim, input.dim())), mult);
}

Tensor softmax(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype, double mult,
               OptionalName constraint, OptionalScales scales) {
  check_dtype("softmax", dtype);
  const double s = choose_scales("softmax", scales, constraint, 2, softmax_rule(input, dim, mult))[0];
  auto x = times(dtype ? input.to(*dtype) : input, mult);
  return scaled(at::_softmax(x.contiguous(), dim, /*half_to_float=*/false), s);
}

std::tuple<Tensor> softmax_backward(const Tensor& grad, const Tensor& result, int64_t dim, double mult,
                                    OptionalName constraint, OptionalScales scales, std::array<bool, 1> mask) {
  if (!mask[0]) return {Tensor()};
  check_gradient("softmax", grad, result.sizes());
  const auto s = choose_scales("softmax", scales, constraint, 2, softmax_rule(result, dim, mult));
  auto probabilities = at::mul(result, 1 / s[0]);
  auto back = at::_softmax_backward_data(grad.contiguous(), probabilities, dim, result.scalar_type());
  return {scaled(back, mult * s[1])};
}

// ---- dropout: a value is kept with probability 1 - p; the output has unit variance again, not the input's mean

void check_dropout(double p) {
  if (p >= 0 && p <= 1) return;
  throw Error(ErrorKind::InvalidArgument, "dropout: p must be between 0 and 1, not " + std::to_string(p) + ".");
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, bool train) {
  check_dropout(p);
  if (!train || p == 0) {
    return {at::empty_like(input).copy_(input), at::ones({}, input.options()).expand(input.sizes())};
  }
  // The seed is the CPU generator's on every device, as that of stochastic rounding.
  const auto noise =
      p == 1 ? at::zeros_like(input) : dropout_noise(input, 1 - p, rules::dropout(p) / (1 - p), draw_seed());
  return {at::mul(input, noise), noise};
}

Tensor dropout(const Tensor& input, double p, bool train) {
  check_dropout(p);
  if (!train || p == 0) return at::empty_like(input).copy_(input);
  return std::get<0>(native_dropout(input, p, train));
}

// Nothing is dropped.
bool dropout_is_identity(at::ArrayRef<c10::IValue> arguments) {
  const double p = arguments[1].toDouble();
  check_dropout(p);
  return !arguments[2].toBool() || p == 0;
}

std::tuple<Tensor> dropout_backward(const Tensor& grad, const Tensor& noise, std::array<bool, 1> mask) {
  if (!mask[0]) return {Tensor()};
  return {like(grad * noise, noise)};
}

// ---- Meta

Tensor like_meta(const Tensor& input) { return at::empty_like(input); }

Tensor softmax_meta(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype, double, OptionalName,
                    OptionalScales) {
  at::maybe_wrap_dim(dim, input.dim());
  check_dtype("softmax", dtype);
  return at::empty_like(input, input.options().dtype(dtype.value_or(input.scalar_type())),
                        at::MemoryFormat::Contiguous);
}
std::tuple<Tensor, Tensor> native_dropout_meta(const Tensor& input, double p, bool train) {
  if (!train || p == 0) return {like_meta(input), at::empty({}, input.options()).expand_symint(input.sym_sizes())};
  return {like_meta(input), like_meta(input)};
}

std::vector<double> softmax_scales(const Tensor& input, int64_t dim, double mult) {
  return softmax_rule(input, dim, mult);
}

}  // namespace

const RegisterOperators ops_activation_rows{
    {"plumb::", "gelu silu silu_glu softmax softmax_scales"},
    {"plumb::", "dropout native_dropout", {.draws_if = "train"}},
    {"plumb::",
     "gelu_backward silu_backward silu_glu_backward softmax_backward dropout_backward",
     {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::string tail = "str? constraint=\"to_output_scale\", float[]? scales=None) -> Tensor result";
  define(m, "gelu(Tensor input, *, str approximate=\"none\", float mult=1.0, " + tail, gelu, meta_from<like_meta>(gelu),
         differentiable());
  define_backward(
      m,
      "gelu_backward(Tensor grad, Tensor input, str approximate, float mult, str? constraint, float[]? scales, "
      "bool[1] mask) -> (Tensor grad_input)",
      gelu_backward);
  define(m, "silu(Tensor input, *, float mult=1.0, " + tail, silu, meta_from<like_meta>(silu), differentiable());
  define_backward(
      m,
      "silu_backward(Tensor grad, Tensor input, float mult, str? constraint, float[]? scales, bool[1] mask) -> "
      "(Tensor grad_input)",
      silu_backward);
  define(m, "silu_glu(Tensor input, Tensor gate, *, float mult=1.0, float[]? scales=None) -> Tensor", silu_glu,
         meta_from<like_meta>(silu_glu), differentiable());
  define_backward(
      m,
      "silu_glu_backward(Tensor grad, Tensor input, Tensor gate, float mult, float[]? scales, bool[2] mask) -> "
      "(Tensor grad_input, Tensor grad_gate)",
      silu_glu_backward);
  define(m, "softmax(Tensor input, int dim, ScalarType? dtype=None, *, float mult=1.0, " + tail, softmax, softmax_meta,
         differentiable());
  define_backward(m,
                  "softmax_backward(Tensor grad, Tensor result, int dim, float mult, str? constraint, float[]? scales, "
                  "bool[1] mask) -> (Tensor grad_input)",
                  softmax_backward);
  define(m, "dropout(Tensor input, float p=0.5, bool train=True) -> Tensor", {at::Tag::nondeterministic_seeded},
         dropout, meta_from<like_meta>(dropout), differentiable(dropout_is_identity));
  define(m, "native_dropout(Tensor input, float p, bool train) -> (Tensor result, Tensor noise)",
         {at::Tag::nondeterministic_seeded}, native_dropout, native_dropout_meta);
  define_backward(m, "dropout_backward(Tensor grad, Tensor noise, bool[1] mask) -> (Tensor grad_input)",
                  dropout_backward);
  define(m, "softmax_scales(Tensor input, int dim, float mult) -> float[]", softmax_scales);
}

}  // namespace plumb
