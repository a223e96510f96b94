#include "plumb/autograd/simulate_format.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "plumb/autograd/recompute/recompute_recipe.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/define_operator.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/tensors/node_seeds.h"

namespace plumb {
namespace {

bool leaves_alone(std::string_view format) { return format == "none"; }

// Returns a seed for the backward pass that differs from the forward's.
std::optional<int64_t> backward_seed(std::optional<int64_t> seed) {
  return seed ? std::optional<int64_t>(int64_t(uint64_t(*seed) ^ 0x9E3779B97F4A7C15ull)) : std::nullopt;
}

at::Tensor simulate_format_kernel(const at::Tensor& x, std::string_view fwd, std::string_view bwd,
                                  std::optional<int64_t> seed, int64_t dim) {
  if (!leaves_alone(bwd)) cached_format(bwd);
  // The schema promises a tensor of its own.
  if (leaves_alone(fwd)) return x.clone();
  return quantise(x, cached_format(fwd), as_seed(seed), dim);
}

// Throws for a text that is no format, or a tensor that is not rounded.
void check_formats(const at::Tensor& x, std::string_view fwd, std::string_view bwd) {
  if (!leaves_alone(fwd)) cached_format(fwd);
  if (!leaves_alone(bwd)) cached_format(bwd);
  if (!leaves_alone(fwd) || !leaves_alone(bwd)) carrier_of(x.scalar_type(), "simulate_format");
}

at::Tensor simulate_format_meta(const at::Tensor& x, std::string_view fwd, std::string_view bwd, std::optional<int64_t>,
                                int64_t) {
  check_formats(x, fwd, bwd);
  return at::empty_like(x);
}

// Returns another tensor on x's memory. It is no view to autograd, which would forbid in-place writes to it. The
// version counter is shared, so that autograd detects a write to an x that it saved.
at::Tensor same_memory(const at::Tensor& x) {
  at::Tensor result = at::alias(x);
  if (!x.is_inference() && !result.is_inference())
    result.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
  return result;
}

// Nobody else can see the gradient, and nothing watches operators: it may be rounded where it lies.
bool is_ours(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && (gradient.is_cpu() || gradient.is_cuda()) && gradient.layout() == at::kStrided &&
         !at::GradMode::is_enabled() && !at::isTensorSubclassLike(gradient) && !gradient.is_neg() &&
         gradient.storage().use_count() == 1 && is_dense(gradient) && !c10::impl::dispatch_mode_enabled();
}

// Measured in the order of memory, as measure() does it, and in its pieces.
bool measures_while_rounding(const at::Tensor& x) { return x.is_contiguous() && !x.is_neg(); }

template <class Round>
at::Tensor measured_apart(const at::Tensor& x, const Measuring& measuring, const Round& round) {
  if (measuring.before) *measuring.before = measure(x, measuring.options);
  at::Tensor result = round();
  if (measuring.after) *measuring.after = measure(result, measuring.options);
  return result;
}

}  // namespace

std::optional<int64_t> seed_of_passes(std::optional<int64_t> seed, std::string_view bwd) {
  if (seed || !nodes_are_seeded() || leaves_alone(bwd)) return seed;
  if (cached_format(bwd).rounding != Rounding::Stochastic) return seed;
  return static_cast<int64_t>(draw_seed());
}

at::Tensor simulate_forward(const at::Tensor& x, std::string_view fwd, std::optional<int64_t> seed, int64_t dim,
                            const Measuring& measuring) {
  auto [before, after, options] = measuring;
  if (leaves_alone(fwd)) {
    if (before) *before = measure(x, options);
    if (after) *after = before ? *before : measure(x, options);
    return same_memory(x);
  }
  const FPFormat& format = cached_format(fwd);
  if ((before || after) && !measures_while_rounding(x))
    return measured_apart(x, measuring, [&] { return simulate_forward(x, fwd, seed, dim); });
  if (before || after) {
    at::Tensor result = quantise_and_measure(x, format, before, after, options, as_seed(seed), dim);
    remember_quantised(result, format);
    return result;
  }
  at::Tensor result = quantise_and_remember(x, format, as_seed(seed));
  return result.defined() ? result : ops::quantise(x, fwd, "", 0, seed, dim);
}

at::Tensor simulate_backward(at::Tensor& gradient, std::string_view bwd, std::optional<int64_t> seed, int64_t dim,
                             const Measuring& measuring) {
  auto [before, after, options] = measuring;
  if (leaves_alone(bwd)) {
    if (before) *before = measure(gradient, options);
    if (after) *after = before ? *before : measure(gradient, options);
    return gradient;
  }
  const FPFormat& format = cached_format(bwd);
  if ((before || after) && !measures_while_rounding(gradient))
    return measured_apart(gradient, measuring, [&] { return simulate_backward(gradient, bwd, seed, dim); });
  seed = backward_seed(seed);
  if (before || after) return quantise_and_measure(gradient, format, before, after, options, as_seed(seed), dim);
  if (is_ours(gradient)) return quantise_(gradient, format, as_seed(seed), dim);
  return ops::quantise(gradient, bwd, "", 0, seed, dim);
}

namespace {

struct SimulateFormat : torch::autograd::Function<SimulateFormat> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::string fwd,
                            std::string bwd, std::optional<int64_t> seed, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView below;
    seed = seed_of_passes(seed, bwd);
    context->saved_data["seed"] = seed;
    context->saved_data["dim"] = dim;
    context->saved_data["format"] = std::move(bwd);
    return simulate_forward(x, fwd, seed, dim);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list& gradients) {
    torch::autograd::variable_list results(5);
    if (!gradients[0].defined()) return results;
    results[0] =
        simulate_backward(gradients[0], context->saved_data["format"].toStringRef(),
                          context->saved_data["seed"].toOptional<int64_t>(), context->saved_data["dim"].toInt());
    return results;
  }
};

at::Tensor simulate_format_autograd(const at::Tensor& x, std::string_view fwd, std::string_view bwd,
                                    std::optional<int64_t> seed, int64_t dim) {
  check_formats(x, fwd, bwd);
  require_plain_autograd("plumb::simulate_format", x);
  if (at::GradMode::is_enabled() && x.requires_grad())
    return SimulateFormat::apply(x, std::string(fwd), std::string(bwd), seed, dim);
  at::AutoDispatchBelowADInplaceOrView below;
  return ops::simulate_format(x, fwd, bwd, seed, dim);
}

}  // namespace

at::Tensor ops::simulate_format(const at::Tensor& x, std::string_view fwd, std::string_view bwd,
                                std::optional<int64_t> seed, int64_t dim) {
  return call_operator<"simulate_format">(x, fwd, bwd, seed, dim);
}

const RegisterOperators simulate_format_rows{
    {"plumb::", "simulate_format", {.passes_through = true}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  // Random when stochastic and without a seed: torch.compile must neither merge nor replay such calls.
  define(m, "simulate_format(Tensor x, str fwd, str bwd, int? seed=None, int dim=-1) -> Tensor",
         {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded}, simulate_format_kernel, simulate_format_meta,
         simulate_format_autograd);
}

namespace {

constexpr size_t kKnown = 64;          // tensors remembered: a product's inputs are quantized just before it
constexpr int64_t kFewElements = 512;  // below it a hook costs more than it saves

struct Known {
  WeakStorage storage;
  std::shared_ptr<Recipe> unused;  // until a node saves it; then nodes alone keep it, and the codes with it
  std::weak_ptr<Recipe> used;
};

struct Recent {
  std::vector<Known> ring;
  size_t next = 0;
};
Recent& recent() {
  thread_local Recent r;
  return r;
}

bool has_codes(const at::Tensor& x, const FPFormat& format) {
  return format.bits() <= 8 && !format.has_blocks() && has_plain_memory(x) && x.numel() >= kFewElements;
}

// Returns all of x's memory in its order, with x's version counter.
at::Tensor memory_of(const at::Tensor& x) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto elements = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  at::Tensor memory = x.as_strided({elements}, {1}, 0);
  memory.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
  return memory;
}

void remember(const at::Tensor& memory, const FPFormat& format, at::Tensor codes) {
  static const auto decode = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::decode", "");
  auto& [ring, next] = recent();
  for (Known& known : ring) {
    if (known.storage.expired()) known.unused.reset();
  }
  auto recipe = std::make_shared<Recipe>(decode, std::vector<c10::IValue>(), std::vector<c10::IValue>{memory}, 0);
  recipe->make_by(
      [codes = std::move(codes), format, dtype = memory.scalar_type()] { return unpack_codes(codes, format, dtype); });
  Known known{memory.storage().getWeakStorageImpl(), std::move(recipe), {}};
  if (ring.size() < kKnown) {
    ring.push_back(std::move(known));
  } else {
    ring[next] = std::move(known);
    next = (next + 1) % kKnown;
  }
}

}  // namespace

bool knows_codes() { return !recent().ring.empty(); }

std::shared_ptr<Recipe> recipe_of_codes(const c10::StorageImpl* storage) {
  for (Known& known : recent().ring) {
    if (known.storage._unsafe_get_target() != storage || known.storage.expired()) continue;
    return known.unused ? known.unused : known.used.lock();
  }
  return nullptr;
}

void let_go_of_codes(const std::shared_ptr<Recipe>& recipe) {
  for (Known& known : recent().ring) {
    if (known.unused == recipe) known.used = std::exchange(known.unused, nullptr);
  }
}

void remember_quantised(const at::Tensor& x, const FPFormat& format) {
  if (!has_codes(x, format)) return;
  const at::Tensor memory = memory_of(x);
  if (at::Tensor codes = pack_codes(memory, format); codes.defined()) remember(memory, format, std::move(codes));
}

at::Tensor quantise_and_remember(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed) {
  if (!has_codes(x, format)) return {};
  auto [result, codes] = quantise_and_pack(x, format, seed);
  if (codes.defined()) remember(memory_of(result), format, std::move(codes));
  return result;
}

}  // namespace plumb
