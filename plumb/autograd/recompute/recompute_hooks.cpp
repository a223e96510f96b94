// Fills what nodes saved for as long as they run.
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "plumb/autograd/recompute/recompute.h"
#include "plumb/autograd/recompute/recompute_recipe.h"

namespace plumb {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// State that both hooks of a node share.
struct Uses {
  Uses(Node& node, std::vector<RecipeUse> of) : node(node), uses(std::move(of)) {
    for (RecipeUse& use : uses) use.recipe->pending++;
  }
  ~Uses() { forget(); }
  void forget() {
    for (RecipeUse& use : std::exchange(uses, {})) {
      if (!use.over) use.recipe->done();
    }
  }
  // Not in a backward that does not want the gradient for which alone it was saved.
  bool needs(const RecipeUse& use) const {
    return use.needed_by < 0 || node.task_should_compute_output(static_cast<size_t>(use.needed_by));
  }

  Node& node;  // owns the hooks
  std::vector<RecipeUse> uses;
};

struct Fill : torch::autograd::FunctionPreHook {
  explicit Fill(std::shared_ptr<Uses> shared) : of(std::move(shared)) {}
  variable_list operator()(const variable_list& grads) override {
    for (RecipeUse& use : of->uses) {
      if (use.recipe->decision != Recipe::Decision::Recompute || !of->needs(use)) continue;
      if (!use.recipe->filled()) use.recipe->fill(use.recipe->memory().storage());
      use.here = true;
    }
    return grads;
  }
  const std::shared_ptr<Uses> of;
};

struct Empty : torch::autograd::FunctionPostHook {
  explicit Empty(std::shared_ptr<Uses> shared) : of(std::move(shared)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    // Nodes for a second derivative have saved the same tensors: these stay filled.
    const bool stay = c10::GradMode::is_enabled();
    for (RecipeUse& use : of->uses) {
      if (!std::exchange(use.here, false) || stay) continue;
      use.recipe->empty();
      if (!std::exchange(use.over, true)) use.recipe->done();
    }
    if (!stay && !torch::autograd::get_current_graph_task_keep_graph()) of->forget();
    return outputs;
  }
  const std::shared_ptr<Uses> of;
};

template <class Ours>
bool is_hook(const auto& hook) {
  return dynamic_cast<const Ours*>(hook.get()) != nullptr;
}

}  // namespace

void fill_around(Node& node, std::vector<RecipeUse> uses) {
  auto shared = std::make_shared<Uses>(node, std::move(uses));
  node.add_pre_hook(std::make_unique<Fill>(shared));
  node.add_post_hook(std::make_unique<Empty>(shared));
}

bool has_no_hooks_but_recipes(Node& node) {
  return std::ranges::all_of(node.pre_hooks(), [](const auto& hook) { return is_hook<Fill>(hook); }) &&
         std::ranges::all_of(node.post_hooks(), [](const auto& hook) { return is_hook<Empty>(hook); });
}

void drop_recomputed(Node& node) {
  for (const auto& hook : node.pre_hooks()) {
    const auto* fill = dynamic_cast<const Fill*>(hook.get());
    if (!fill) continue;
    for (const RecipeUse& use : fill->of->uses) use.recipe->forget();
  }
}

void drop_recipes(Node& node) {
  std::erase_if(node.pre_hooks(), [](const auto& hook) { return is_hook<Fill>(hook); });
  std::erase_if(node.post_hooks(), [](const auto& hook) { return is_hook<Empty>(hook); });
}

}  // namespace plumb
