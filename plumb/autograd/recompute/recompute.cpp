#include "plumb/autograd/recompute/recompute.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <unordered_map>

#include "plumb/autograd/recompute/recompute_facts.h"
#include "plumb/autograd/recompute/recompute_recipe.h"
#include "plumb/core/error.h"
#include "plumb/core/table.h"
#include "plumb/operators/dispatch_keys.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

constexpr size_t kFewBytes = 4096;  // below it the hook costs more than it saves
constexpr size_t kSmallShare = 8;   // an input that nobody keeps is copied if it is so much smaller than the result
constexpr int64_t kMostSteps = 8;   // operators in a row that are computed again for one result

thread_local CheapRecompute::State* current = nullptr;

}  // namespace

// An operator's argument, replaced by another tensor with the same values that nobody else holds. If it has a second
// owner after the call, the operator's node has saved it.
struct Loan {
  size_t arg;
  at::Tensor alias;
  std::shared_ptr<Recipe> recipe;  // recipe of the argument's memory, or null
};

struct CheapRecompute::State {
  explicit State(bool check) : check(check), outer(std::exchange(current, this)) { keys.emplace(kRecomputeKey); }
  ~State() { current = outer; }
  // While no CheapRecompute lives: knows of values of formats alone (simulate_format.h).
  static State& of_codes() {
    thread_local State state;
    return state;
  }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool cheap);
  void decide_all();

  const bool check = false;
  RecomputeReport report;

 private:
  State() = default;
  void lend(size_t arg, c10::IValue& value, std::vector<Loan>& loans);
  void remember(const c10::OperatorHandle& op, std::vector<c10::IValue> args, at::ArrayRef<c10::IValue> results,
                std::vector<RecipeUse>& uses);
  void retain(const at::Tensor& saved);
  std::shared_ptr<Recipe> recipe_of(const Part& part) const;
  bool is_retained(const c10::StorageImpl* storage) const;
  bool decide(Recipe& recipe);
  bool can_make_again(Recipe& recipe);
  bool decide_source(const Recipe& recipe, Recipe::Source& source);
  bool same_again(Recipe& recipe);
  void drop(const std::shared_ptr<Recipe>& recipe);
  void give_back(const std::shared_ptr<Recipe>& recipe);

  State* const outer = nullptr;
  int depth = 0;  // calls that run, one inside of another: what an outer one was lent stays filled until it is over
  std::vector<std::shared_ptr<Recipe>> given_back;  // by inner calls
  std::optional<c10::impl::IncludeDispatchKeyGuard> keys;
  // By memory. The weak references inside keep addresses from being given out again.
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Recipe>> recipes;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> retained;  // kept by some node
  std::vector<std::shared_ptr<Recipe>> undecided;                     // saved since the last decision
};

namespace {

// Returns whether autocast may cast inside of this call: what it gives is then not made of its arguments as they are.
// `keys` has those of autocast only where that is on, for the devices of the arguments.
bool may_cast(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  for (const c10::DispatchKey key : keys& c10::autocast_dispatch_keyset) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

template <bool cheap>
void note_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecomputeKey);
  const bool watched = (current || knows_codes()) && c10::GradMode::is_enabled() &&
                       !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradCPU) &&
                       !at::SavedTensorDefaultHooks::get_hooks();
  if (!watched || may_cast(op, keys)) return op.redispatchBoxed(keys, stack);
  (current ? *current : CheapRecompute::State::of_codes()).call(op, keys, stack, cheap);
}

template <class Visit>
void visit_tensors(const std::vector<c10::IValue>& values, const Visit& visit) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const c10::IValue& element : value.toListRef()) visit(element.toTensor());
  }
}

// Returns the factors of a product, by place among the tensors that it has edges for: each is needed for the other's
// gradient alone.
std::optional<std::pair<int, int>> factors_of(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::mul") return std::pair(0, 1);
  const Contraction& product = operator_facts(name).contraction;
  if (product.kind != ContractionKind::Product || !name.starts_with("aten::")) return std::nullopt;
  auto place = [&](const ContractedOperand& operand) {
    return op.schema().argumentIndexWithName(std::string(operand.argument)).value_or(0);
  };
  return std::pair(place(product.operands[0]), place(product.operands[1]));
}

// Compares two results of the same layout byte for byte, the whole of their memory. Waits for their device.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cpu()) return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto bytes = [](const at::Tensor& t) { return t.as_strided({t.numel()}, {1}).view(at::kByte); };
  return at::equal(bytes(a), bytes(b));
}

int needed_by(const c10::OperatorHandle& op, size_t arg) {
  const auto factors = factors_of(op);
  if (!factors) return -1;
  const int place = static_cast<int>(arg);
  return place == factors->first ? factors->second : place == factors->second ? factors->first : -1;
}

}  // namespace

void CheapRecompute::State::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                                 bool cheap) {
  const bool codes_only = this != current;
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  std::vector<c10::IValue> args(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  bool plain = true;
  size_t most = 0;
  visit_tensors(args, [&](const at::Tensor& t) {
    plain = plain && has_plain_memory(t) && !t._fw_grad(0).defined();
    most = std::max(most, plain ? t.nbytes() : 0);
  });
  if (!plain || most < kFewBytes) return op.redispatchBoxed(keys, stack);
  std::vector<Loan> loans;
  for (size_t i = 0; i < count; ++i) lend(i, (*stack)[first + i], loans);
  {
    ++depth;
    const auto leave = c10::make_scope_exit([this] { --depth; });
    op.redispatchBoxed(keys, stack);
  }
  const at::ArrayRef<c10::IValue> results = torch::jit::last(*stack, op.schema().returns().size());
  const at::Tensor result = results[0].isTensor() ? results[0].toTensor() : at::Tensor();
  std::vector<RecipeUse> uses;
  for (Loan& loan : loans) {
    const bool saved = loan.alias.use_count() > 1;
    if (!loan.recipe) {
      if (saved) retain(loan.alias);
    } else if (saved) {
      uses.push_back({loan.recipe, needed_by(op, loan.arg)});
    } else if (loan.recipe->decision == Recipe::Decision::Recompute) {
      give_back(loan.recipe);
    }
  }
  if (result.defined() && result.grad_fn() && has_plain_memory(result)) {
    if (cheap && !codes_only) {
      remember(op, std::move(args), results, uses);
    } else if (!codes_only && result.storage().use_count() > 1) {
      retain(result);
    }
    if (!uses.empty()) {
      for (const RecipeUse& use : uses) {
        if (use.recipe->is_of_codes()) let_go_of_codes(use.recipe);
        if (use.recipe->decision == Recipe::Decision::Pending) undecided.push_back(use.recipe);
        if (use.recipe->decision == Recipe::Decision::Recompute) drop(use.recipe);
      }
      fill_around(*result.grad_fn(), std::move(uses));
    }
  }
  if (depth > 0) return;
  if (cheap || codes_only) decide_all();
  for (const auto& recipe : std::exchange(given_back, {})) recipe->empty();
}

// Empties the memory of a result that is computed again, at once or when no call may read it any more.
void CheapRecompute::State::give_back(const std::shared_ptr<Recipe>& recipe) {
  if (depth == 0) {
    recipe->empty();
  } else {
    given_back.push_back(recipe);
  }
}

void CheapRecompute::State::retain(const at::Tensor& saved) {
  retained.emplace(saved.storage().unsafeGetStorageImpl(), saved.storage().getWeakStorageImpl());
}

void CheapRecompute::State::lend(size_t arg, c10::IValue& value, std::vector<Loan>& loans) {
  if (value.isTensorList()) return;  // cat saves none
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor t = value.toTensor();
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (impl->is_wrapped_number() || (t.requires_grad() && t.is_leaf())) return;
  auto recipe = recipe_of(Part(t));
  if (recipe && recipe->decision == Recipe::Decision::Keep) return;
  if (!recipe && (this != current || is_retained(t.storage().unsafeGetStorageImpl()))) return;
  auto copy = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true);
  if (recipe) copy->set_storage_keep_dtype(recipe->lend(t.storage()));
  at::Tensor alias(std::move(copy));
  if (t.requires_grad()) torch::autograd::impl::set_gradient_edge(alias, torch::autograd::impl::gradient_edge(t));
  value = alias;
  loans.push_back({arg, std::move(alias), std::move(recipe)});
}

void CheapRecompute::State::remember(const c10::OperatorHandle& op, std::vector<c10::IValue> args,
                                     at::ArrayRef<c10::IValue> results, std::vector<RecipeUse>& uses) {
  const at::Tensor& result = results[0].toTensor();
  // On one device, whose thread alone then uses the recipe.
  bool apart = true;
  visit_tensors(args, [&](const at::Tensor& t) {
    const bool here = t.device() == result.device() || t.unsafeGetTensorImpl()->is_wrapped_number();
    apart = apart && here && !t.is_alias_of(result);
  });
  const bool saved = result.storage().use_count() > 1;
  // The whole of its memory, so that any view of it can be made again.
  if (!apart || result.nbytes() < kFewBytes || result.storage().nbytes() != result.nbytes() ||
      result.storage_offset() != 0) {
    if (saved) retain(result);
    return;
  }
  const c10::Storage lent = saved ? part_from_node(result) : c10::Storage();
  auto recipe = std::make_shared<Recipe>(op, std::move(args), results, static_cast<int64_t>(recipes.size()));
  recipes[result.storage().unsafeGetStorageImpl()] = recipe;
  if (!saved) return;
  recipe->lent(lent);
  uses.push_back({std::move(recipe), -1});
}

std::shared_ptr<Recipe> CheapRecompute::State::recipe_of(const Part& part) const {
  const c10::StorageImpl* storage = part.storage._unsafe_get_target();
  const auto it = recipes.find(storage);
  auto recipe = it == recipes.end() ? recipe_of_codes(storage) : it->second;
  if (!recipe || recipe->result.version != part.version || recipe->result.options.dtype() != part.options.dtype())
    return nullptr;
  return recipe;
}

bool CheapRecompute::State::is_retained(const c10::StorageImpl* storage) const {
  const auto it = retained.find(storage);
  return it != retained.end() && !it->second.expired();
}

bool CheapRecompute::State::decide_source(const Recipe& recipe, Recipe::Source& source) {
  if (source.held.defined()) return true;
  if (auto made_by = recipe_of(source.part); made_by && decide(*made_by)) {
    source.made_by = std::move(made_by);
    return true;
  }
  if (!source.part.unchanged()) return false;
  const at::Tensor alive = source.part.lock();
  if (!alive.defined()) return false;
  if (is_retained(source.part.storage._unsafe_get_target())) {
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
  if (same_bytes(first, again)) return true;
  report.differing++;
  return false;
}

void CheapRecompute::State::drop(const std::shared_ptr<Recipe>& recipe) {
  give_back(recipe);
  if (std::exchange(recipe->counted, true)) return;
  auto& entry = report.by_operator[recipe->op.operator_name().name];
  entry.tensors++;
  entry.bytes += static_cast<int64_t>(recipe->nbytes);
  for (const auto& source : recipe->sources) {
    if (source.copied) entry.bytes -= static_cast<int64_t>(source.held.nbytes());
  }
}

// Decides for all results saved since the last time, inputs before the results computed from them, so that it is known
// which inputs stay.
void CheapRecompute::State::decide_all() {
  std::ranges::sort(undecided, {}, [](const auto& recipe) { return recipe->order; });
  std::shared_ptr<Recipe> last;
  for (const auto& recipe : std::exchange(undecided, {})) {
    if (recipe == last) continue;
    last = recipe;
    if (decide(*recipe)) {
      drop(recipe);
    } else if (const at::Tensor kept = recipe->result.lock(); kept.defined()) {
      retain(kept);
    }
  }
}

CheapRecompute::CheapRecompute(bool check) : state_(std::make_unique<State>(check)) {}
CheapRecompute::~CheapRecompute() = default;
const RecomputeReport& CheapRecompute::report() const { return state_->report; }

void CheapRecompute::finish() { state_->decide_all(); }

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
    return bytes_text(static_cast<double>(e.bytes), 3) + " of " + std::to_string(e.tensors);
  };
  std::string line = "computed again, not kept: " + amount(total()) + " results";
  for (const auto& [name, entry] : by_operator) {
    line += (name == by_operator.begin()->first ? " (" : ", ") + name + " " + amount(entry);
  }
  if (!by_operator.empty()) line += ")";
  if (differing > 0) line += "; " + std::to_string(differing) + " kept because they came out otherwise";
  return line;
}

namespace {

std::vector<RecomputeFacts>& declared_facts() {
  static std::vector<RecomputeFacts> facts;
  return facts;
}

}  // namespace

const std::vector<RecomputeFacts>& recompute_facts() { return declared_facts(); }

void compute_again(torch::Library& library, const RecomputeFacts& facts) {
  declared_facts().push_back(facts);
  std::istringstream names{std::string(facts.names)};
  for (std::string name; names >> name;) {
    library.impl(name.c_str(), facts.cheap ? torch::CppFunction::makeFromBoxedFunction<&note_call<true>>()
                                           : torch::CppFunction::makeFromBoxedFunction<&note_call<false>>());
  }
}

// Operators that are composite on the CPU are not here: their parts are recorded, and each has its own node to save
// what it needs.
TORCH_LIBRARY_IMPL(aten, PLUMB_RECOMPUTE_KEY, m) {
  compute_again(
      m, {"aten",
          "_softmax _to_copy abs add.Tensor cat clamp clone div.Tensor elu exp gelu glu hardsigmoid hardswish hardtanh "
          "leaky_relu log_sigmoid_forward masked_fill.Scalar masked_fill.Tensor mish mul.Tensor native_group_norm "
          "native_layer_norm neg pow.Tensor_Scalar reciprocal relu rsqrt sigmoid silu softplus sqrt sub.Tensor tanh "
          "threshold where.self",
          true});
  compute_again(m, {"aten",
                    "_log_softmax _scaled_dot_product_flash_attention_for_cpu addcmul addmm avg_pool2d baddbmm bmm "
                    "convolution max_pool2d_with_indices mm native_batch_norm nll_loss_forward",
                    false});
}
TORCH_LIBRARY_IMPL(_, PLUMB_RECOMPUTE_KEY, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace plumb
