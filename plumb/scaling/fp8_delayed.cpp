#include "plumb/scaling/fp8_delayed.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "plumb/core/error.h"
#include "plumb/numerics/operators.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/fp8.h"
#include "plumb/scaling/matmul_parts.h"

namespace plumb {
namespace {

using at::Tensor;
using std::string_view;
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
