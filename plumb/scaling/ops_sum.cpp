// add, residual_split, residual_add, scale_fwd, scale_bwd.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ---- add

std::vector<double> add_rule(at::IntArrayRef input, at::IntArrayRef other) {
  const auto out = at::infer_size(input, other);
  const int64_t n = c10::multiply_integers(out);
  const int64_t n_input = c10::multiply_integers(input), n_other = c10::multiply_integers(other);
  return rules::add(n / std::max<int64_t>(n_input, 1), n / std::max<int64_t>(n_other, 1), n_input == 1 || n_other == 1);
}

Tensor add(const Tensor& input, const Tensor& other, const at::Scalar& alpha, OptionalName constraint,
           OptionalScales scales) {
  const double s = choose_scales("add", scales, constraint, 3, add_rule(input.sizes(), other.sizes()))[0];
  return weighted_sum(input, s, other, s * alpha.toDouble());
}

std::tuple<Tensor, Tensor> add_backward(const Tensor& grad, at::IntArrayRef input_size, at::IntArrayRef other_size,
                                        const at::Scalar& alpha, OptionalName constraint, OptionalScales scales,
                                        std::array<bool, 2> mask) {
  // Before anything is computed from them: they are numbers of a file, perhaps.
  check_gradient("add", grad, at::infer_size(input_size, other_size));
  const auto s = choose_scales("add", scales, constraint, 3, add_rule(input_size, other_size));
  // Summing first: the factor then goes over the smaller tensor.
  auto back = [&](at::IntArrayRef size, double factor) {
    if (grad.sizes() == size) return at::mul(grad, factor);
    return scaled(at::sum_to(grad, size, /*always_return_non_view=*/true), factor);
  };
  return {mask[0] ? back(input_size, s[1]) : Tensor(), mask[1] ? back(other_size, s[2] * alpha.toDouble()) : Tensor()};
}

Tensor add_meta(const Tensor& input, const Tensor& other, const at::Scalar&, OptionalName, OptionalScales) {
  return at::add(input, other);
}

std::vector<double> add_scales(const Tensor& input, const Tensor& other) {
  return add_rule(input.sizes(), other.sizes());
}

// ---- residual layers: the residual branch weighs tau times the skip. residual_split scales gradients only and
// residual_add values only, so that inside the branch both have unit scale.

Tensor residual_add(const Tensor& residual, const Tensor& skip, double tau) {
  const auto weight = rules::residual(tau);
  return weighted_sum(residual, weight.residual, skip, weight.skip);
}

struct ResidualAdd : Function<ResidualAdd> {
  static Tensor forward(AutogradContext* ctx, const Tensor& residual, const Tensor& skip, double tau) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["residual"] = residual.sym_sizes();
    ctx->saved_data["skip"] = skip.sym_sizes();
    return call_operator<"residual_add">(residual, skip, tau);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto back = [&](const char* name, size_t i) {
      return ctx->needs_input_grad(i) ? at::sum_to(grads[0], ctx->saved_data[name].toSymIntVector()) : Tensor();
    };
    return {back("residual", 0), back("skip", 1), Tensor()};
  }
};

Tensor residual_add_autograd(const Tensor& residual, const Tensor& skip, double tau) {
  require_plain_autograd("plumb::residual_add", residual), require_plain_autograd("plumb::residual_add", skip);
  return ResidualAdd::apply(residual, skip, tau);
}

std::tuple<Tensor, Tensor> residual_split(const Tensor& input, double) {
  return {at::empty_like(input).copy_(input), at::empty_like(input).copy_(input)};
}

struct ResidualSplit : Function<ResidualSplit> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, double tau) {
    ctx->saved_data["tau"] = tau;
    const bool alias = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return plain(input);
    }();
    // Two views of the input cost nothing; autograd refuses in-place writes to them. Where a tracer watches, the
    // results must be tensors of their own.
    if (alias) {
      return {input.view_as(input), input.view_as(input)};
    }
    at::AutoDispatchBelowADInplaceOrView below;
    auto [residual, skip] = call_operator<"residual_split", std::tuple<Tensor, Tensor>>(input, tau);
    return {residual, skip};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto weight = rules::residual(ctx->saved_data["tau"].toDouble());
    if (!grads[0].defined() && !grads[1].defined()) return {Tensor(), Tensor()};
    if (!grads[1].defined()) return {grads[0] * weight.residual, Tensor()};
    if (!grads[0].defined()) return {grads[1] * weight.skip, Tensor()};
    // Under a tracer one operator, so that the traced program sums as this one does.
    if (at::isTensorSubclassLike(grads[0]) && !recording(grads[0]) && !recording(grads[1])) {
      return {call_operator<"residual_add">(grads[0], grads[1], ctx->saved_data["tau"].toDouble()), Tensor()};
    }
    return {weighted_sum(grads[0], weight.residual, grads[1], weight.skip), Tensor()};
  }
};

std::tuple<Tensor, Tensor> residual_split_autograd(const Tensor& input, double tau) {
  require_plain_autograd("plumb::residual_split", input);
  if (!input.requires_grad() || !at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_operator<"residual_split", std::tuple<Tensor, Tensor>>(input, tau);
  }
  auto both = ResidualSplit::apply(input, tau);
  return {both[0], both[1]};
}

// ---- scale_fwd, scale_bwd

Tensor scale_fwd(const Tensor& input, double scale) { return at::mul(input, scale); }
Tensor scale_bwd(const Tensor& input, double) { return at::empty_like(input).copy_(input); }

template <bool kForward>
struct Scale : Function<Scale<kForward>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, double scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["scale"] = scale;
    return kForward ? call_operator<"scale_fwd">(input, scale) : call_operator<"scale_bwd">(input, scale);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (kForward || !grads[0].defined()) return {grads[0], Tensor()};
    return {grads[0] * ctx->saved_data["scale"].toDouble(), Tensor()};
  }
};

Tensor scale_fwd_autograd(const Tensor& input, double scale) {
  require_plain_autograd("plumb::scale_fwd", input);
  return Scale<true>::apply(input, scale);
}
Tensor scale_bwd_autograd(const Tensor& input, double scale) {
  require_plain_autograd("plumb::scale_bwd", input);
  return Scale<false>::apply(input, scale);
}

}  // namespace

const RegisterOperators ops_sum_rows{
    {"plumb::", "add add_scales residual_split residual_add scale_fwd scale_bwd"},
    {"plumb::", "add_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "add(Tensor input, Tensor other, *, Scalar alpha=1, str? constraint=\"to_output_scale\", "
         "float[]? scales=None) -> Tensor",
         add, add_meta, differentiable());
  define_backward(m,
                  "add_backward(Tensor grad, SymInt[] input_size, SymInt[] other_size, Scalar alpha, str? constraint, "
                  "float[]? scales, bool[2] mask) -> (Tensor grad_input, Tensor grad_other)",
                  add_backward);
  define(m, "add_scales(Tensor input, Tensor other) -> float[]", add_scales);
  define(m, "residual_split(Tensor input, float tau=1.0) -> (Tensor, Tensor)", residual_split, residual_split,
         residual_split_autograd);
  define(m, "residual_add(Tensor residual, Tensor skip, float tau=1.0) -> Tensor", residual_add, residual_add,
         residual_add_autograd);
  define(m, "scale_fwd(Tensor input, float scale) -> Tensor", scale_fwd, scale_fwd, scale_fwd_autograd);
  define(m, "scale_bwd(Tensor input, float scale) -> Tensor", scale_bwd, scale_bwd, scale_bwd_autograd);
}

}  // namespace plumb
