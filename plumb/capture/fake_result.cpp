#include "plumb/capture/fake_result.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cmath>
#include <optional>
#include <type_traits>
#include <unordered_set>

namespace plumb {
namespace {

using torch::jit::Stack;

constexpr int64_t kLarge = 1 << 14;     // elements of an operand: below it computing costs no more than this does
constexpr int64_t kLargeMap = 1 << 18;  // the same of what is no product
constexpr const char* kAttention = "aten::scaled_dot_product_attention";
constexpr const char* kGelu = "aten::gelu";  // zeros are what it makes of zeros

const std::unordered_set<std::string>& products() {
  // Those whose strides on the CPU are those of the meta kernels.
  static const std::unordered_set<std::string> names = {"aten::linear", "aten::matmul", "aten::mm", "aten::bmm",
                                                        "aten::addmm"};
  return names;
}

bool ordinary(const at::Tensor& t) {
  return t.is_cpu() && t.layout() == at::kStrided && !at::isTensorSubclassLike(t) && !t.is_neg() && !t.is_conj() &&
         !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !t._fw_grad(0).defined();
}

// Sizes of linear's result where its arguments are as they nearly always are: asking the meta kernels takes a hundred
// times longer, since those of addmm are written in Python. Empty for all others, also for what does not fit.
c10::DimVector sizes_of_linear(const c10::IValue* arguments) {
  const at::Tensor &x = arguments[0].toTensor(), &w = arguments[1].toTensor();
  const bool biased = arguments[2].isTensor() && arguments[2].toTensor().defined();
  if (at::autocast::is_autocast_enabled(at::kCPU) || x.dim() < 2 || w.dim() != 2 || !x.is_contiguous() ||
      !x.is_floating_point() || x.scalar_type() != w.scalar_type() || x.size(-1) != w.size(1))
    return {};
  if (biased) {
    const at::Tensor& b = arguments[2].toTensor();
    if (b.dim() != 1 || b.size(0) != w.size(0) || b.scalar_type() != w.scalar_type()) return {};
  }
  c10::DimVector sizes(x.sizes());
  sizes.back() = w.size(0);
  return sizes;
}

// Node handles are std::shared_ptr in older releases of torch and c10::intrusive_ptr in newer ones.
template <class Base>
auto never_run() {
  const char* why = "the fake result of a skipped product has no derivative";
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Base>) {
    return c10::make_intrusive<torch::autograd::NotImplemented>(why);
  } else {
    return std::make_shared<torch::autograd::NotImplemented>(why);
  }
}

// Attention of the first of a batch: which of torch's kernels it is, and so the strides, does not depend on the batch.
std::optional<Stack> of_one(at::ArrayRef<c10::IValue> arguments) {
  Stack one(arguments.begin(), arguments.end());
  if (one[4].toDouble() != 0) return std::nullopt;  // it draws random numbers
  int64_t batch = 0;
  for (size_t i = 0; i < 4; ++i) {
    if (!one[i].isTensor() || !one[i].toTensor().defined()) continue;
    const at::Tensor t = one[i].toTensor();
    if (i == 0) batch = t.dim() == 4 ? t.size(0) : 0;
    if (i == 3 && (t.dim() < 4 || t.size(0) == 1)) continue;  // a mask for all
    if (t.dim() != 4 || t.size(0) != batch || batch < 2) return std::nullopt;
    one[i] = t.narrow(0, 0, 1);
  }
  return one;
}

}  // namespace

bool fake_result(const c10::OperatorHandle& op, const std::string& name, Stack* stack) {
  const bool attention = name == kAttention, map = name == kGelu;
  if (!(attention || map || products().count(name)) || c10::impl::dispatch_mode_enabled()) return false;
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  bool large = false, requires_grad = false;
  for (size_t i = first; i < stack->size(); ++i) {
    if (!(*stack)[i].isTensor() || !(*stack)[i].toTensor().defined()) continue;
    const at::Tensor& t = (*stack)[i].toTensor();
    if (!ordinary(t)) return false;
    large |= t.numel() >= (map ? kLargeMap : kLarge);
    requires_grad |= t.requires_grad();
  }
  if (!large) return false;
  requires_grad = requires_grad && at::GradMode::is_enabled();
  std::optional<Stack> one;
  if (attention) {
    one = of_one(torch::jit::last(*stack, count));
    if (!one) return false;
    op.callBoxed(*one);  // with the gradients that its kernel is chosen by
  }
  at::Tensor result;
  const at::NoGradGuard no_grad;
  if (one) {
    const at::Tensor shape = one->back().toTensor();
    auto sizes = shape.sizes().vec(), strides = shape.strides().vec();
    sizes[0] = (*stack)[first].toTensor().size(0);
    strides[0] = shape.numel();  // the batch is the outermost dimension whichever kernel it is
    result = at::empty_strided(sizes, strides, shape.options()).zero_();
  } else if (map) {
    result = at::zeros_like((*stack)[first].toTensor());
  } else if (const auto sizes = name == "aten::linear" ? sizes_of_linear(&(*stack)[first]) : c10::DimVector();
             !sizes.empty()) {
    result = at::zeros(sizes, (*stack)[first].toTensor().options());
  } else {
    torch::jit::Stack shapes;
    for (size_t i = first; i < stack->size(); ++i) {
      const c10::IValue& v = (*stack)[i];
      if (v.isTensor() && v.toTensor().defined()) {
        const at::Tensor& t = v.toTensor();
        shapes.emplace_back(at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)));
      } else {
        shapes.push_back(v);
      }
    }
    op.callBoxed(shapes);  // shapes that do not fit throw here as the real ones would
    const at::Tensor shape = shapes.back().toTensor();
    result = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(at::kCPU)).zero_();
  }
  if (requires_grad && result.is_floating_point())
    torch::autograd::set_history(result, never_run<torch::autograd::Node>());
  stack->resize(first);
  stack->emplace_back(std::move(result));
  return true;
}

void limit_product(const c10::OperatorHandle& op, const OperatorFacts& facts, Stack* stack) {
  if (!facts.contraction || facts.contraction.kind == ContractionKind::Attention || op.schema().is_mutable() ||
      !stack->back().isTensor())
    return;
  const at::Tensor result = stack->back().toTensor();
  if (!result.defined() || result.layout() != at::kStrided || at::isTensorSubclassLike(result) ||
      !result.is_floating_point() || result.numel() == 0 || !result.is_non_overlapping_and_dense())
    return;
  at::Tensor scale;
  {
    const at::NoGradGuard no_grad;
    const at::ScalarType wide = result.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    scale = at::linalg_vector_norm(result, 2, at::OptionalIntArrayRef(), false, wide);
    scale.div_(std::sqrt(static_cast<double>(result.numel()))).clamp_min_(1);
  }
  // Not in place: an einsum of one tensor, a parameter say, is a view of it.
  stack->back() = result.div(scale);
}

}  // namespace plumb
