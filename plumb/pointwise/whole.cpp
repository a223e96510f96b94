#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "plumb/pointwise/parts.h"

namespace plumb::pointwise_parts {
namespace {

using at::Tensor;
using Kind = PointwiseKind;

struct ScaleBoth : torch::autograd::Function<ScaleBoth> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, double f, double b) {
    context->saved_data["b"] = b;
    at::AutoDispatchBelowADInplaceOrView below;
    return at::mul(x, f);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    return {gradients[0] * context->saved_data["b"].toDouble(), {}, {}};
  }
};

Tensor apply_step(const PointwiseStep& step, const Tensor& a, const Tensor& b) {
  const bool number = step.b.kind == PointwiseArg::Number;
  const double n = step.b.number;
  switch (step.kind) {
    case Kind::Add: return number ? at::add(a, n) : at::add(a, b);
    case Kind::Sub: return number ? at::sub(a, n) : at::sub(a, b);
    case Kind::Mul: return number ? at::mul(a, n) : at::mul(a, b);
    case Kind::Div: return number ? at::div(a, n) : at::div(a, b);
    case Kind::Neg: return at::neg(a);
    case Kind::Relu: return at::relu(a);
    case Kind::Sigmoid: return at::sigmoid(a);
    case Kind::Tanh: return at::tanh(a);
    case Kind::Exp: return at::exp(a);
    case Kind::Sqrt: return at::sqrt(a);
    case Kind::Silu: return at::silu(a);
    case Kind::Gelu: return at::gelu(a);
    case Kind::GeluTanh: return at::gelu(a, "tanh");
    case Kind::Scale: return ScaleBoth::apply(a, step.forward, step.backward);
  }
  return a;
}

Tensor silu_gradient(const Tensor& g, const Tensor& x) {
  // torch's silu_backward has no derivative of its own.
  if (!at::GradMode::is_enabled()) return at::silu_backward(g, x);
  const Tensor sigma = at::sigmoid(x);
  return g * (sigma * (1 + x * (1 - sigma)));
}

// Follows torch's derivatives.yaml; y is the step's result.
Tensor step_gradient(const PointwiseStep& step, int side, const Tensor& a, const Tensor& b, const Tensor& y,
                     const Tensor& g) {
  const bool number = step.b.kind == PointwiseArg::Number;
  switch (step.kind) {
    case Kind::Add: return g;
    case Kind::Sub: return side == 0 ? g : at::neg(g);
    case Kind::Mul: return number ? at::mul(g, step.b.number) : at::mul(g, side == 0 ? b : a);
    case Kind::Div:
      if (number) return at::div(g, step.b.number);
      return side == 0 ? at::div(g, b) : at::mul(at::neg(g), at::div(at::div(a, b), b));
    case Kind::Neg: return at::neg(g);
    case Kind::Relu: return at::threshold_backward(g, y, 0);
    case Kind::Sigmoid: return at::sigmoid_backward(g, y);
    case Kind::Tanh: return at::tanh_backward(g, y);
    case Kind::Exp: return at::mul(g, y);
    case Kind::Sqrt: return at::div(g, at::mul(y, 2));
    case Kind::Silu: return silu_gradient(g, a);
    case Kind::Gelu: return at::gelu_backward(g, a);
    case Kind::GeluTanh: return at::gelu_backward(g, a, "tanh");
    case Kind::Scale: return step.backward == 1 ? g : at::mul(g, step.backward);
  }
  return g;
}

Tensor value_of(const PointwiseArg& arg, at::TensorList inputs, const Tensors& steps) {
  if (arg.kind == PointwiseArg::Input) return inputs[static_cast<size_t>(arg.index)];
  if (arg.kind == PointwiseArg::Step) return steps[static_cast<size_t>(arg.index)];
  return {};
}

}  // namespace

Tensors run_steps(const PointwiseProgram& program, at::TensorList inputs) {
  Tensors values;
  for (const auto& step : program.steps)
    values.push_back(apply_step(step, value_of(step.a, inputs, values), value_of(step.b, inputs, values)));
  return values;
}

Tensor run_whole(const PointwiseProgram& program, at::TensorList inputs) { return run_steps(program, inputs).back(); }

Tensors backward_whole(const PointwiseProgram& program, const PointwiseNeeds& needs, const Tensor& gradient,
                       const Tensors& inputs, Tensors steps, const std::vector<bool>& wanted) {
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& step = program.steps[i];
    if (needs.again[i]) steps[i] = apply_step(step, value_of(step.a, inputs, steps), value_of(step.b, inputs, steps));
  }
  Tensors incoming(steps.size()), results(wanted.size());
  incoming.back() = gradient;
  for (size_t i = steps.size(); i-- > 0;) {
    if (!incoming[i].defined()) continue;
    const auto& step = program.steps[i];
    const Tensor a = value_of(step.a, inputs, steps), b = value_of(step.b, inputs, steps);
    for (int side = 0; side < 2; ++side) {
      const auto& arg = side == 0 ? step.a : step.b;
      const auto at = static_cast<size_t>(arg.index);
      if (arg.kind == PointwiseArg::Input && wanted[at]) {
        const Tensor one = step_gradient(step, side, a, b, steps[i], incoming[i]);
        results[at] = results[at].defined() ? results[at] + one : one;
      } else if (arg.kind == PointwiseArg::Step && needs.flows[at]) {
        incoming[at] = step_gradient(step, side, a, b, steps[i], incoming[i]);
      }
    }
  }
  return results;
}

}  // namespace plumb::pointwise_parts
