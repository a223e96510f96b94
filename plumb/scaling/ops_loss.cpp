// cross_entropy, mse_loss. The value is the ordinary loss's; the gradient is that of the summed loss, scaled to unit
// variance, whatever the reduction: the factor goes into the scalar gradient and costs nothing.
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <torch/library.h>

#include "plumb/core/error.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;

void check_reduction(const char* op, int64_t reduction) {
  if (reduction >= 0 && reduction < at::Reduction::END) return;
  throw Error(ErrorKind::InvalidArgument, std::string(op) + ": " + std::to_string(reduction) + " is no reduction.", "",
              "0 (none), 1 (mean) or 2 (sum)");
}

// ---- cross_entropy

int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// Targets are probabilities of the classes, not their numbers.
bool are_probabilities(const Tensor& target, const Tensor& input) {
  return target.sizes() == input.sizes() && at::isFloatingType(target.scalar_type());
}

// Returns a value for each class, to be multiplied with log_p.
Tensor per_class(const Tensor& weight, const Tensor& log_p) {
  std::vector<int64_t> sizes(static_cast<size_t>(log_p.dim()), 1);
  sizes[static_cast<size_t>(class_dim(log_p))] = weight.size(0);
  return weight.view(sizes);
}

void check_cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                         double smoothing) {
  check_reduction("cross_entropy", reduction);
  if (input.dim() == 0) bad_shape("cross_entropy", "input needs a dimension of classes.");
  if (!are_probabilities(target, input)) {
    auto expected = input.sizes().vec();
    expected.erase(expected.begin() + class_dim(input));
    if (target.sizes() != at::IntArrayRef(expected)) {
      bad_shape("cross_entropy", "target " + shape_text(target) + " does not fit input " + shape_text(input) + ".");
    }
  }
  if (present(weight) && (weight->dim() != 1 || weight->size(0) != input.size(class_dim(input)))) {
    bad_shape("cross_entropy",
              "weight " + shape_text(*weight) + " needs one value for each class of input " + shape_text(input) + ".");
  }
  if (!(smoothing >= 0 && smoothing <= 1)) {
    throw Error(ErrorKind::InvalidArgument,
                "cross_entropy: label_smoothing must be between 0 and 1, not " + std::to_string(smoothing) + ".");
  }
}

Tensor log_probabilities(const Tensor& input, double mult) {
  return at::log_softmax(mult == 1 ? input : input * mult, class_dim(input));
}

std::tuple<Tensor, Tensor> native_cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                                                int64_t reduction, int64_t ignore_index, double label_smoothing,
                                                double mult) {
  check_cross_entropy(input, target, weight, reduction, label_smoothing);
  auto log_p = log_probabilities(input, mult);
  // log_softmax of log-probabilities is the identity, but costs a pass: plain class targets go to nll_loss themselves.
  auto loss = !are_probabilities(target, input) && label_smoothing == 0
                  ? at::nll_loss_nd(log_p, target, weight, reduction, ignore_index)
                  : at::cross_entropy_loss(log_p, target, weight, reduction, ignore_index, label_smoothing);
  return {loss, log_p};
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                     int64_t ignore_index, double label_smoothing, double mult) {
  return std::get<0>(native_cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing, mult));
}

// The summed loss is -sum(q * log_p): q, the target as (weighted, smoothed) probabilities, in log_p's shape.
Tensor target_weights(const Tensor& log_p, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                      double smoothing) {
  const int64_t dim = class_dim(log_p), classes = log_p.size(dim);
  Tensor class_weight;
  if (present(weight)) class_weight = per_class(weight->to(log_p.scalar_type()), log_p);
  if (are_probabilities(target, log_p)) {
    auto q = target * (1 - smoothing) + smoothing / static_cast<double>(classes);
    return class_weight.defined() ? q * class_weight : q;
  }
  auto ignored = target.eq(ignore_index).unsqueeze(dim);
  auto q = at::zeros_like(log_p, {}, at::MemoryFormat::Contiguous);
  q.scatter_(dim, target.unsqueeze(dim).masked_fill(ignored, 0), 1 - smoothing);
  q.add_(smoothing / static_cast<double>(classes));
  if (class_weight.defined()) q.mul_(class_weight);
  return q.masked_fill_(ignored, 0);
}

std::tuple<Tensor, Tensor> cross_entropy_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                  const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                                                  double label_smoothing, double mult, const Tensor& saved_log_p,
                                                  std::array<bool, 2> mask) {
  check_cross_entropy(input, target, weight, reduction, label_smoothing);
  check_gradient("cross_entropy", saved_log_p, input.sizes());
  const int64_t dim = class_dim(input);
  const bool watched = recording(input) || recording(grad);
  auto log_p = watched ? log_probabilities(input, mult) : saved_log_p;
  double s = rules::cross_entropy_grad(input.size(dim), label_smoothing);
  auto g = grad * s;
  // Weighing the classes changes their gradients' ratios, not their scale.
  if (present(weight)) g = g / weight->to(g.scalar_type()).square().mean().sqrt();
  Tensor grad_input, grad_target;
  const bool per_row = reduction == at::Reduction::None;
  auto rows = per_row && input.dim() > 1 ? g.unsqueeze(dim) : g;
  if (mask[0]) {
    Tensor grad_log_p;
    if (!are_probabilities(target, input) && label_smoothing == 0 && input.dim() <= 2 && !watched) {
      auto unused = at::ones({}, input.options());
      grad_log_p = at::nll_loss_backward(g, log_p, target, weight, per_row ? at::Reduction::None : at::Reduction::Sum,
                                         ignore_index, unused);
    } else {
      grad_log_p = target_weights(log_p, target, weight, ignore_index, label_smoothing) * rows.neg();
    }
    grad_input = at::_log_softmax_backward_data(grad_log_p, log_p, dim, input.scalar_type());
  }
  if (mask[1]) {
    // Target probabilities: the slope of the summed loss with the loss's own weights.
    auto q = at::ones_like(log_p);
    if (present(weight)) q = q * per_class(*weight, log_p);
    grad_target = log_p * q * rows.neg() * (1 - label_smoothing);
  }
  return {grad_input, grad_target};
}

// ---- mse_loss

void check_mse(const Tensor& input, const Tensor& target, int64_t reduction) {
  check_reduction("mse_loss", reduction);
  if (input.sizes() == target.sizes()) return;
  bad_shape("mse_loss", "input " + shape_text(input) + " and target " + shape_text(target) + " must have one shape.");
}

Tensor mse_loss(const Tensor& input, const Tensor& target, int64_t reduction) {
  check_mse(input, target, reduction);
  return at::mse_loss(input, target, reduction);
}

std::tuple<Tensor, Tensor> mse_loss_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                             int64_t reduction, std::array<bool, 2> mask) {
  check_mse(input, target, reduction);
  const auto per_value = reduction == at::Reduction::None ? at::Reduction::None : at::Reduction::Sum;
  auto back = at::mse_loss_backward(grad * rules::mse_grad(), input, target, per_value);
  return {mask[0] ? back : Tensor(), mask[1] ? back.neg() : Tensor()};
}

// ---- Meta

Tensor cross_entropy_meta(const Tensor& input, const Tensor& target, const OptionalTensor&, int64_t reduction,
                          c10::SymInt, double, double) {
  check_reduction("cross_entropy", reduction);
  if (input.dim() == 0) bad_shape("cross_entropy", "input needs a dimension of classes.");
  auto sizes = input.sym_sizes().vec();
  sizes.erase(sizes.begin() + class_dim(input));
  return reduction == at::Reduction::None ? input.new_empty_symint(sizes) : input.new_empty({});
}
std::tuple<Tensor, Tensor> native_cross_entropy_meta(const Tensor& input, const Tensor& target,
                                                     const OptionalTensor& weight, int64_t reduction,
                                                     c10::SymInt ignore_index, double smoothing, double mult) {
  return {cross_entropy_meta(input, target, weight, reduction, ignore_index, smoothing, mult),
          at::empty_like(input, {}, at::MemoryFormat::Contiguous)};
}
Tensor mse_loss_meta(const Tensor& input, const Tensor&, int64_t reduction) {
  check_reduction("mse_loss", reduction);
  return reduction == at::Reduction::None ? at::empty_like(input) : input.new_empty({});
}
std::tuple<Tensor, Tensor> mse_loss_backward_meta(const Tensor&, const Tensor& input, const Tensor& target, int64_t,
                                                  std::array<bool, 2> mask) {
  return {mask[0] ? at::empty_like(input) : Tensor(), mask[1] ? at::empty_like(input) : Tensor()};
}

}  // namespace

const RegisterOperators ops_loss_rows{
    {"plumb::", "cross_entropy native_cross_entropy mse_loss"},
    {"plumb::", "cross_entropy_backward mse_loss_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::string entropy =
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=Mean, SymInt ignore_index=-100, "
      "float label_smoothing=0.0, *, float mult=1.0) -> ";
  define(m, entropy + "Tensor", cross_entropy, cross_entropy_meta, differentiable());
  define(m, "native_" + entropy + "(Tensor result, Tensor log_p)", native_cross_entropy, native_cross_entropy_meta);
  define_backward<GradientLayout::kInOrder>(
      m,
      "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, int reduction, "
      "SymInt ignore_index, float label_smoothing, float mult, Tensor log_p, bool[2] mask) -> "
      "(Tensor grad_input, Tensor grad_target)",
      cross_entropy_backward);
  define(m, "mse_loss(Tensor input, Tensor target, int reduction=Mean) -> Tensor", mse_loss, mse_loss_meta,
         differentiable());
  define(m,
         "mse_loss_backward(Tensor grad, Tensor input, Tensor target, int reduction, bool[2] mask) -> "
         "(Tensor grad_input, Tensor grad_target)",
         mse_loss_backward, mse_loss_backward_meta, differentiable_backward());
}

}  // namespace plumb
