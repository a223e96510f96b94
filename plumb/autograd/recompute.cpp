#include "plumb/autograd/recompute.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "plumb/autograd/recompute_note.h"
#include "plumb/autograd/recompute_recipe.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

using torch::autograd::Node;

// A mode key above autograd and the composite operators that nothing else uses (captures have the one above it). Only
// the operators below have kernels for it, all others do not notice.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

constexpr size_t kFewBytes = 4096;  // below it the hook costs more than it saves
constexpr size_t kSmallShare = 8;   // an input that nobody keeps is copied if it is so much smaller than the result
constexpr int64_t kMostSteps = 8;   // operators in a row that are computed again for one result

thread_local CheapRecompute::State* current = nullptr;

}  // namespace

struct CheapRecompute::State {
  explicit State(bool check) : check(check), outer(std::exchange(current, this)), keys(kKey) {}
  ~State() { current = outer; }

  void remember(const c10::OperatorHandle& op, std::vector<c10::IValue> args, at::ArrayRef<c10::IValue> results);
  void scan_saved(Node* root);
  bool empty() const { return recipes.empty(); }

  const bool check;
  RecomputeReport report;

 private:
  Recipe* recipe_of(const Part& part) const;
  bool is_retained(const Part& part) const;
  bool decide(Recipe& recipe);
  bool can_make_again(Recipe& recipe);
  bool decide_source(const Recipe& recipe, Recipe::Source& source);
  bool same_again(Recipe& recipe);
  void replace(const Saved& saved, const at::Tensor& data, Recipe& recipe);

  State* const outer;
  const c10::impl::IncludeDispatchKeyGuard keys;
  // By memory. The weak references inside keep addresses from being given out again.
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Recipe>> recipes;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> retained;  // kept by some node
  std::unordered_set<const Node*> visited;
};

namespace {

// Whether autocast may cast inside of this call: what it gives is then not made of its arguments as they are.
bool may_cast(const c10::OperatorHandle& op) {
  return at::autocast::is_autocast_enabled(at::kCPU) &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
}

void note_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (!current || !c10::GradMode::is_enabled() || may_cast(op)) return op.redispatchBoxed(keys, stack);
  const auto given = torch::jit::last(*stack, op.schema().arguments().size());
  std::vector<c10::IValue> args(given.begin(), given.end());
  op.redispatchBoxed(keys, stack);
  const auto results = torch::jit::last(*stack, op.schema().returns().size());
  if (!results[0].isTensor()) return;
  const at::Tensor& result = results[0].toTensor();
  if (!has_plain_memory(result) || !result.grad_fn()) return;
  auto usable = [&](const c10::IValue& arg) {
    if (!arg.isTensor() || !arg.toTensor().defined()) return true;
    return has_plain_memory(arg.toTensor()) && !arg.toTensor().is_alias_of(result);
  };
  for (const c10::IValue& arg : args) {
    if (!usable(arg)) return;
    if (!arg.isTensorList()) continue;
    for (const c10::IValue& element : arg.toListRef()) {
      if (!usable(element)) return;
    }
  }
  current->remember(op, std::move(args), results);
}

}  // namespace

void CheapRecompute::State::remember(const c10::OperatorHandle& op, std::vector<c10::IValue> args,
                                     at::ArrayRef<c10::IValue> results) {
  const at::Tensor& result = results[0].toTensor();
  // The whole of its memory, so that any view of it can be made again.
  if (result.nbytes() < kFewBytes || result.storage().nbytes() != result.nbytes() || result.storage_offset() != 0)
    return;
  auto recipe = std::make_shared<Recipe>(op, std::move(args), results, static_cast<int64_t>(recipes.size()));
  recipes[result.storage().unsafeGetStorageImpl()] = std::move(recipe);
  scan_saved(&*result.grad_fn());
}

Recipe* CheapRecompute::State::recipe_of(const Part& part) const {
  const auto it = recipes.find(part.storage._unsafe_get_target());
  if (it == recipes.end()) return nullptr;
  Recipe& recipe = *it->second;
  return recipe.result.version == part.version && recipe.result.options.dtype() == part.options.dtype() ? &recipe
                                                                                                        : nullptr;
}

bool CheapRecompute::State::is_retained(const Part& part) const {
  const auto it = retained.find(part.storage._unsafe_get_target());
  return it != retained.end() && !it->second.expired();
}

bool CheapRecompute::State::decide_source(const Recipe& recipe, Recipe::Source& source) {
  if (source.held.defined()) return true;
  if (Recipe* made_by = recipe_of(source.part); made_by && decide(*made_by)) {
    source.made_by = made_by->shared_from_this();
    return true;
  }
  if (!source.part.unchanged()) return false;
  const at::Tensor alive = source.part.lock();
  if (!alive.defined()) return false;
  if (is_retained(source.part)) {
    source.held = alive;
    return true;
  }
  if (alive.nbytes() * kSmallShare > recipe.nbytes) return false;
  // In the very same layout, on which the order of sums may depend.
  if (!alive.is_non_overlapping_and_dense()) return false;
  const at::AutoDispatchBelowADInplaceOrView below;
  source.held = alive.clone();
  source.copied = true;
  return source.held.strides() == alive.strides();
}

bool CheapRecompute::State::can_make_again(Recipe& recipe) {
  for (Recipe::Source& source : recipe.sources) {
    if (!decide_source(recipe, source)) return false;
    if (source.made_by) recipe.steps += source.made_by->steps;
  }
  return recipe.steps <= kMostSteps && (!check || same_again(recipe));
}

bool CheapRecompute::State::decide(Recipe& recipe) {
  if (recipe.decision != Recipe::Decision::Pending) return recipe.decision == Recipe::Decision::Recompute;
  recipe.decision = Recipe::Decision::Keep;
  if (can_make_again(recipe)) {
    recipe.decision = Recipe::Decision::Recompute;
    for (auto& source : recipe.sources) {
      if (source.made_by) source.made_by->pending++;
    }
  } else {
    for (auto& source : recipe.sources) {
      source.held = at::Tensor();
      source.made_by.reset();
    }
  }
  return recipe.decision == Recipe::Decision::Recompute;
}

bool CheapRecompute::State::same_again(Recipe& recipe) {
  const at::Tensor first = recipe.result.lock();
  if (!first.defined() || !recipe.result.unchanged()) return true;
  for (auto& source : recipe.sources) {
    if (source.made_by) source.made_by->pending++;  // computing uses it
  }
  const at::Tensor again = recipe.compute();
  if (std::memcmp(first.const_data_ptr(), again.const_data_ptr(), recipe.nbytes) == 0) return true;
  report.differing++;
  return false;
}

void CheapRecompute::State::replace(const Saved& saved, const at::Tensor& data, Recipe& recipe) {
  save_recipe(saved, data, recipe.shared_from_this());
  if (std::exchange(recipe.counted, true)) return;
  auto& entry = report.by_operator[recipe.op.operator_name().name];
  entry.tensors++;
  entry.bytes += static_cast<int64_t>(recipe.nbytes);
  for (const auto& source : recipe.sources) {
    if (source.copied) entry.bytes -= static_cast<int64_t>(source.held.nbytes());
  }
}

void CheapRecompute::State::scan_saved(Node* root) {
  std::vector<Saved> saved;
  std::vector<Node*> stack{root};
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (!visited.insert(node).second) continue;
    collect_saved(*node, saved);
    for (const auto& edge : node->next_edges()) {
      if (edge.function) stack.push_back(&*edge.function);
    }
  }
  struct Candidate {
    Saved saved;
    at::Tensor data;
    Recipe* recipe;
  };
  std::vector<Candidate> candidates;
  for (const Saved& s : saved) {
    const auto data = s.variable->get_raw_data();
    if (!data || !has_plain_memory(*data)) continue;
    if (Recipe* recipe = recipe_of(Part(*data))) {
      candidates.push_back({s, *data, recipe});
    } else {
      retained.emplace(data->storage().unsafeGetStorageImpl(), data->storage().getWeakStorageImpl());
    }
  }
  // Inputs before what is made of them: whether they stay is then known.
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.recipe->order < b.recipe->order; });
  for (Candidate& c : candidates) {
    if (decide(*c.recipe)) {
      replace(c.saved, c.data, *c.recipe);
    } else {
      retained.emplace(c.data.storage().unsafeGetStorageImpl(), c.data.storage().getWeakStorageImpl());
    }
  }
}

CheapRecompute::CheapRecompute(bool check) : state_(std::make_unique<State>(check)) {}
CheapRecompute::~CheapRecompute() = default;
const RecomputeReport& CheapRecompute::report() const { return state_->report; }

void CheapRecompute::finish(const std::vector<at::Tensor>& outputs) {
  for (const auto& output : outputs) {
    if (!state_->empty() && output.defined() && output.grad_fn()) state_->scan_saved(&*output.grad_fn());
  }
}

Recompute parse_recompute(const std::string& text) {
  if (text == "none") return Recompute::None;
  if (text == "cheap") return Recompute::Cheap;
  throw Error(ErrorKind::InvalidArgument, "recompute is '" + text + "'", "", "give 'none' or 'cheap'");
}

std::string to_string(Recompute recompute) { return recompute == Recompute::Cheap ? "cheap" : "none"; }

RecomputeReport::Entry RecomputeReport::total() const {
  Entry sum;
  for (const auto& [name, entry] : by_operator) {
    sum.tensors += entry.tensors;
    sum.bytes += entry.bytes;
  }
  return sum;
}

std::string RecomputeReport::text() const {
  auto amount = [](const Entry& e) {
    char text[64];
    std::snprintf(text, sizeof text, "%.3g MiB of %lld", static_cast<double>(e.bytes) / (1 << 20),
                  static_cast<long long>(e.tensors));
    return std::string(text);
  };
  std::string line = "computed again, not kept: " + amount(total()) + " results";
  for (const auto& [name, entry] : by_operator) {
    line += (name == by_operator.begin()->first ? " (" : ", ") + name + " " + amount(entry);
  }
  if (!by_operator.empty()) line += ")";
  if (differing > 0) line += "; " + std::to_string(differing) + " kept because they came out otherwise";
  return line;
}

torch::CppFunction cheap_to_recompute() { return torch::CppFunction::makeFromBoxedFunction<&note_call>(); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  for (const char* name : {"gelu",
                           "silu",
                           "relu",
                           "leaky_relu",
                           "elu",
                           "hardtanh",
                           "hardswish",
                           "hardsigmoid",
                           "softplus",
                           "mish",
                           "threshold",
                           "sigmoid",
                           "tanh",
                           "log_sigmoid_forward",
                           "glu",
                           "native_layer_norm",
                           "_fused_rms_norm",
                           "native_group_norm",
                           "mul.Tensor",
                           "div.Tensor",
                           "add.Tensor",
                           "sub.Tensor",
                           "neg",
                           "rsqrt",
                           "reciprocal",
                           "pow.Tensor_Scalar",
                           "square",
                           "sqrt",
                           "abs",
                           "clamp",
                           "exp",
                           "where.self",
                           "masked_fill.Scalar",
                           "masked_fill.Tensor",
                           "_softmax",
                           "_to_copy",
                           "clone",
                           "cat"}) {
    m.impl(name, cheap_to_recompute());
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace plumb
