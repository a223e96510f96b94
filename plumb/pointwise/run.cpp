// The operator plumb::pointwise and its gradient.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/pointwise/parts.h"

namespace plumb {
namespace {

using namespace pointwise_parts;
using at::Tensor;

const PointwiseProgram& cached_program(std::string_view text) {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<const PointwiseProgram>, Hash, std::equal_to<>> programs;
  {
    std::shared_lock lock(mutex);
    if (auto it = programs.find(text); it != programs.end()) return *it->second;
  }
  auto program = std::make_unique<const PointwiseProgram>(PointwiseProgram::parse(text));
  std::unique_lock lock(mutex);
  return *programs.emplace(std::string(text), std::move(program)).first->second;
}

void check_inputs(const PointwiseProgram& program, at::TensorList inputs) {
  auto fail = [](const std::string& why) {
    throw Error(ErrorKind::TensorMismatch, "plumb::pointwise: " + why, "", "give what the program was made for");
  };
  if (static_cast<int64_t>(inputs.size()) != program.num_inputs || inputs.empty())
    fail("the program takes " + std::to_string(program.num_inputs) + " tensors, not " + std::to_string(inputs.size()));
  for (const Tensor& x : inputs) {
    if (!x.defined()) fail("a tensor is undefined");
    if (!at::isFloatingType(x.scalar_type())) fail(std::string("it does not take ") + c10::toString(x.scalar_type()));
    if (x.scalar_type() != inputs[0].scalar_type() || x.sym_sizes() != inputs[0].sym_sizes() ||
        x.device() != inputs[0].device())
      fail("the tensors differ in shape, dtype or device");
  }
}

bool all_blockable(at::TensorList tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& x) { return !x.defined() || blockable(x); });
}

Tensor pointwise_kernel(at::TensorList inputs, std::string_view text) {
  const auto& program = cached_program(text);
  check_inputs(program, inputs);
  if (!all_blockable(inputs)) return run_whole(program, inputs);
  return run_in_blocks(program, inputs, Tensors(program.steps.size()));
}

Tensor pointwise_meta(at::TensorList inputs, std::string_view text) {
  check_inputs(cached_program(text), inputs);
  return at::empty_like(inputs[0]);
}

PointwiseProgram without_kept(PointwiseProgram program) {
  for (auto& step : program.steps) step.keep = false;
  return program;
}

// Results: the last step's, then those of the kept steps, which have their own history for the second gradient.
struct Pointwise : torch::autograd::Function<Pointwise> {
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList inputs, std::string text) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->set_materialize_grads(false);
    const auto& program = cached_program(text);
    std::vector<bool> wanted;
    for (const Tensor& x : inputs) wanted.push_back(x.requires_grad());
    Tensors results(1), saved;
    // For modes that watch operators this is one operator, with nothing kept on the side.
    const bool watched = at::areAnyTensorSubclassLike(inputs);
    const PointwiseNeeds needs =
        watched ? pointwise_needs(without_kept(program), wanted) : pointwise_needs(program, wanted);
    if (watched) {
      results[0] = ops::pointwise(inputs, text);
    } else {
      Tensors kept(program.steps.size());
      for (size_t i = 0; i + 1 < kept.size(); ++i) {
        if (!needs.kept[i]) continue;
        kept[i] = fresh_like(inputs[0], inputs[0].scalar_type());
        results.push_back(kept[i]);
      }
      results[0] = run_in_blocks(program, inputs, kept);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (needs.inputs[i]) saved.push_back(inputs[i]);
    }
    saved.insert(saved.end(), results.begin() + 1, results.end());
    if (needs.kept.back()) saved.push_back(results[0]);
    context->save_for_backward(std::move(saved));
    context->saved_data["wanted"] = c10::IValue(wanted);
    context->saved_data["watched"] = watched;
    context->saved_data["program"] = std::move(text);
    return results;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const PointwiseProgram& cached = cached_program(context->saved_data["program"].toStringRef());
    const bool watched = context->saved_data["watched"].toBool();
    const PointwiseProgram own = watched ? without_kept(cached) : PointwiseProgram();
    const PointwiseProgram* program = watched ? &own : &cached;
    const auto saved_for = context->saved_data["wanted"].toBoolList().vec();
    const size_t num_inputs = saved_for.size(), num_steps = program->steps.size();
    Tensors results(num_inputs + 1);
    std::vector<bool> wanted(num_inputs);
    for (size_t i = 0; i < num_inputs; ++i) wanted[i] = saved_for[i] && context->needs_input_grad(i);

    const PointwiseNeeds all = pointwise_needs(*program, saved_for), needs = pointwise_needs(*program, wanted);
    const Tensors saved = context->get_saved_variables();
    Tensors inputs(num_inputs), steps(num_steps);
    size_t next = 0;
    for (size_t i = 0; i < num_inputs; ++i) {
      if (all.inputs[i]) inputs[i] = saved[next++];
    }
    for (size_t i = 0; i < num_steps; ++i) {
      if (all.kept[i]) steps[i] = saved[next++];
    }

    auto add = [&](const Tensors& found) {
      for (size_t i = 0; i < num_inputs; ++i) {
        if (!found[i].defined()) continue;
        results[i] = results[i].defined() ? results[i] + found[i] : found[i];
      }
    };
    const bool blocks = !at::GradMode::is_enabled() && all_blockable(inputs) && all_blockable(steps) &&
                        !at::areAnyTensorSubclassLike(gradients) && !at::areAnyTensorSubclassLike(inputs) &&
                        !at::areAnyTensorSubclassLike(steps);
    if (const Tensor& g = gradients[0]; g.defined()) {
      // Operators one by one may keep the memory order of a gradient, and the sums that follow go along memory.
      const bool ordered = g.layout() == at::kStrided && (g.is_contiguous() || !g.is_non_overlapping_and_dense());
      if (blocks && ordered && (g.is_cpu() || pointwise_kernels_for(g)))
        add(backward_in_blocks(*program, needs, g.resolve_neg().contiguous(), inputs, steps, wanted));
      else
        add(backward_whole(*program, needs, g, inputs, steps, wanted));
    }
    add_gradients_of_kept(*program, all, gradients, inputs, steps, wanted, add);
    return results;
  }

  // Only where a gradient was differentiated: kept steps are part of it.
  template <class Add>
  static void add_gradients_of_kept(const PointwiseProgram& program, const PointwiseNeeds& all,
                                    const Tensors& gradients, const Tensors& inputs, const Tensors& steps,
                                    const std::vector<bool>& wanted, const Add& add) {
    size_t at = 1;
    for (size_t i = 0; i + 1 < program.steps.size(); ++i) {
      if (!all.kept[i]) continue;
      const Tensor& g = gradients[at++];
      if (!g.defined()) continue;
      PointwiseProgram part = program;
      part.steps.resize(i + 1);
      add(backward_whole(part, pointwise_needs(part, wanted), g, inputs,
                         Tensors(steps.begin(), steps.begin() + static_cast<int64_t>(i) + 1), wanted));
    }
  }
};

Tensor pointwise_autograd(at::TensorList inputs, std::string_view text) {
  bool wanted = false;
  for (const Tensor& x : inputs) {
    require_plain_autograd("plumb::pointwise", x);
    wanted |= x.defined() && x.requires_grad();
  }
  if (wanted && at::GradMode::is_enabled()) {
    const auto& program = cached_program(text);
    check_inputs(program, inputs);
    // Tensors that cannot go in blocks are quickest one by one.
    if (!at::areAnyTensorSubclassLike(inputs) && !all_blockable(inputs)) return run_whole(program, inputs);
    return Pointwise::apply(inputs, std::string(text))[0];
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return ops::pointwise(inputs, text);
}

}  // namespace

at::Tensor ops::pointwise(at::TensorList inputs, std::string_view program) {
  return call_operator<"pointwise">(inputs, program);
}

}  // namespace plumb

const plumb::RegisterOperators pointwise_rows{
    {"plumb::", "pointwise"},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  m.def("pointwise(Tensor[] inputs, str program) -> Tensor", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, m) { m.impl("pointwise", plumb::pointwise_kernel); }
TORCH_LIBRARY_IMPL(plumb, Meta, m) { m.impl("pointwise", plumb::pointwise_meta); }
TORCH_LIBRARY_IMPL(plumb, Autograd, m) { m.impl("pointwise", plumb::pointwise_autograd); }
