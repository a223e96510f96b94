// The operator plumb::track and its tracker.
//
// A gradient is seen by a hook at the place where autograd has it complete: the tensor's own grad_fn. So the result for
// an intermediate tensor is the tensor itself, with no copy and no node of its own, and so for a stage's inputs. Leaves
// (parameters) and the caller's inputs must not get hooks, which would outlive the graph: the result is an alias of
// them.
#include "plumb/transforms/track/tracker.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <unordered_map>

#include "plumb/autograd/node_handle.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/define_operator.h"
#include "plumb/numerics/hash.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {

Metrics::Data Metrics::Data::of(const TensorMetrics& m) {
  Data d{m.mean_abs, m.abs_mean, m.std, m.abs_max, m.abs_min, m.numel, m.nan_count, m.inf_count, m.zero_count, nullptr};
  if (m.histogram) d.histogram = std::make_shared<const ExponentHistogram>(*m.histogram);
  return d;
}

TensorMetrics Metrics::Data::full() const {
  TensorMetrics m;
  m.mean_abs = mean_abs, m.abs_mean = abs_mean, m.std = std, m.abs_max = abs_max, m.abs_min = abs_min;
  m.numel = numel, m.nan_count = nan_count, m.inf_count = inf_count, m.zero_count = zero_count;
  if (histogram) m.histogram = *histogram;
  return m;
}

namespace {

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::weak_ptr<ScaleTracker>> trackers;
};
Registry& registry() {
  static Registry* r = new Registry;  // never destroyed: trackers may die after static destruction began
  return *r;
}

// Returns null if there is no such slot.
auto* slot_at(auto& slots, int64_t slot) {
  return slot >= 0 && static_cast<size_t>(slot) < slots.size() ? &slots[static_cast<size_t>(slot)] : nullptr;
}
auto& seen_in(auto& slot, ScaleTracker::Direction direction) {
  return direction == ScaleTracker::Direction::Forward ? slot.fwd : slot.bwd;
}

int64_t next_id() {
  std::lock_guard lock(registry().mutex);
  return ++registry().last;
}

}  // namespace

ScaleTracker::ScaleTracker(MetricsOptions options) : id_(next_id()), options_(options) {}

std::shared_ptr<ScaleTracker> ScaleTracker::create(MetricsOptions options) {
  std::shared_ptr<ScaleTracker> tracker(new ScaleTracker(options));
  std::lock_guard lock(registry().mutex);
  registry().trackers[tracker->id_] = tracker;
  return tracker;
}

ScaleTracker::~ScaleTracker() {
  std::lock_guard lock(registry().mutex);
  registry().trackers.erase(id_);
}

std::shared_ptr<ScaleTracker> ScaleTracker::find(int64_t id) {
  // A graph's nodes ask for the same one again and again.
  thread_local int64_t last_id = 0;
  thread_local std::weak_ptr<ScaleTracker> last;
  if (id <= 0) return nullptr;
  if (id != last_id) {
    std::lock_guard lock(registry().mutex);
    auto it = registry().trackers.find(id);
    if (it == registry().trackers.end()) return nullptr;
    last = it->second;
    last_id = id;
  }
  return last.lock();
}

int64_t ScaleTracker::add_slot(bool input, bool probe) {
  std::lock_guard lock(mutex_);
  Slot& slot = slots_.emplace_back();
  slot.input = input, slot.probed = probe;
  return static_cast<int64_t>(slots_.size()) - 1;
}

size_t ScaleTracker::num_slots() const {
  std::lock_guard lock(mutex_);
  return slots_.size();
}

bool ScaleTracker::is_input(int64_t slot) const {
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  return s && s->input;
}

bool ScaleTracker::is_probed(int64_t slot) const {
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  return s && s->probed;
}

std::optional<Metrics> ScaleTracker::metrics(int64_t slot) const {
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  if (!s || !s->fwd.any) return std::nullopt;
  return Metrics{s->fwd.numbers(), s->bwd.any ? std::optional(s->bwd.numbers()) : std::nullopt};
}

std::optional<Metrics::Data> ScaleTracker::measured(int64_t slot, Direction direction) const {
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  return s && seen_in(*s, direction).any ? std::optional(seen_in(*s, direction).numbers()) : std::nullopt;
}

std::shared_ptr<const MetricsSum> ScaleTracker::sum(int64_t slot, Direction direction) const {
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  return s && seen_in(*s, direction).together ? seen_in(*s, direction).sum : nullptr;
}

void ScaleTracker::want(int64_t slot, Wanted wanted) {
  std::lock_guard lock(mutex_);
  if (Slot* s = slot_at(slots_, slot)) s->wanted = wanted;
}

ScaleTracker::Wanted ScaleTracker::wanted(int64_t slot) const {
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  return s ? s->wanted : Wanted{false, false, false};
}

void ScaleTracker::clear() {
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    slot.fwd = slot.bwd = {};
    slot.fwd_hashes.clear(), slot.bwd_hashes.clear();
    slot.runs = 0;
  }
}

std::shared_ptr<ScaleTracker> ScaleTracker::twin() const {
  auto copy = create(options_);
  std::lock_guard lock(mutex_);
  for (const Slot& slot : slots_) {
    Slot& made = copy->slots_.emplace_back();
    made.input = slot.input, made.probed = slot.probed;
    made.wanted = slot.wanted;
  }
  copy->enabled_ = enabled_.load();
  return copy;
}

void ScaleTracker::record(int64_t slot, Direction direction, const at::Tensor& x, const RunRows& rows) {
  if (!x.defined() || x.is_meta() || x.is_quantized()) return;
  // The gradient of a dense table (nn.Embedding with sparse=True) may be sparse.
  const bool sparse = x.is_sparse() && !x.unsafeGetTensorImpl()->is_python_dispatch();
  if (!sparse && (x.layout() != at::kStrided || at::isTensorSubclassLike(x))) return;
  const Wanted wanted = this->wanted(slot);
  if (!x.is_floating_point() && !wanted.keep && !(wanted.hash && x.is_complex())) return;
  if (wanted.hash || wanted.keep) hash(slot, direction, sparse ? x.detach().to_dense() : x, rows, wanted.keep);
  if (!wanted.metrics || !x.is_floating_point()) return;
  const MetricsOptions options = options_for(slot);
  const bool together = this->together(slot, direction);
  if (!together && x.is_cpu())
    return keep(slot, direction, {.any = true, .data = Metrics::Data::of(measure(x, options))});
  auto sum = std::make_shared<MetricsSum>(options);
  sum->add(x.is_mps() ? x.detach().cpu() : x);  // a device without float64
  keep(slot, direction, {.any = true, .together = together, .sum = std::move(sum)});
}

void ScaleTracker::record(int64_t slot, Direction direction, const TensorMetrics& metrics) {
  Metrics::Data data = Metrics::Data::of(metrics);
  if (!options_for(slot).histogram) data.histogram = nullptr;
  keep(slot, direction, {.any = true, .data = std::move(data)});
}

MetricsOptions ScaleTracker::options_for(int64_t slot) const {
  return {.histogram = options_.histogram || wanted(slot).histogram};
}

void ScaleTracker::hash(int64_t slot, Direction direction, const at::Tensor& x, const RunRows& rows, bool keep) {
  Hashing made{rows, hashed_words(x), 0, {}, {}};
  if (keep)
    made.kept = x.detach().clone();
  else if (x.is_cpu())
    made.hash = hash_of(x);
  else
    made.on_device = ops::tensor_hash(x.detach());
  std::lock_guard lock(mutex_);
  Slot* s = slot_at(slots_, slot);
  if (s) (direction == Direction::Forward ? s->fwd_hashes : s->bwd_hashes).push_back(std::move(made));
}

std::vector<ScaleTracker::Hashed> ScaleTracker::hashes(int64_t slot, Direction direction) const {
  std::vector<Hashed> out;
  std::lock_guard lock(mutex_);
  const Slot* s = slot_at(slots_, slot);
  if (!s) return out;
  for (const Hashing& each : direction == Direction::Forward ? s->fwd_hashes : s->bwd_hashes)
    out.push_back({each.rows, each.words,
                   each.on_device.defined() ? static_cast<uint64_t>(each.on_device.item<int64_t>()) : each.hash,
                   each.kept});
  std::ranges::stable_sort(out, {}, [](const Hashed& h) { return h.rows.first; });
  return out;
}

RunRows ScaleTracker::next_rows(int64_t slot) {
  if (const auto rows = running_rows()) return *rows;
  std::lock_guard lock(mutex_);
  Slot* s = slot_at(slots_, slot);
  return {s ? s->runs++ : 0, 0};
}

bool ScaleTracker::takes_tensors(int64_t slot, Direction direction) const {
  const Wanted wanted = this->wanted(slot);
  return together(slot, direction) || wanted.hash || wanted.keep;
}

bool ScaleTracker::together(int64_t slot, Direction direction) const {
  const Wanted wanted = this->wanted(slot);
  return direction == Direction::Forward ? wanted.forward_together : wanted.backward_together;
}

void ScaleTracker::keep(int64_t slot, Direction direction, Seen seen) {
  std::lock_guard lock(mutex_);
  Slot* s = slot_at(slots_, slot);
  if (!s) return;
  Seen& so_far = seen_in(*s, direction);
  if (seen.together && so_far.together) {
    so_far.sum->add(*seen.sum);
    so_far.any = true;
  } else {
    so_far = std::move(seen);
  }
  if (direction == Direction::Forward && !s->wanted.backward_together) s->bwd.any = false;
}

namespace {

using torch::autograd::variable_list;

bool is_traced(const at::Tensor& x) { return x.is_floating_point() && at::isTensorSubclassLike(x) && !x.is_meta(); }

// Under a tracer (torch.compile, export) tensors have no numbers yet: an operator that measures when the traced program
// runs. Nobody uses its result, so that in-place writes, and the views they go through, stay those of the program;
// tracers must know that it has an effect (python/plumb/_fx.py).
at::Tensor track_traced(const at::Tensor& x, int64_t slot, int64_t id, bool backward) {
  if (auto tracker = ScaleTracker::find(id); tracker && tracker->enabled()) {
    const auto wanted = tracker->wanted(slot);
    if (backward ? wanted.backward : wanted.forward)
      // A traced program runs each way once for each of its forwards.
      tracker->record(slot, backward ? ScaleTracker::Direction::Backward : ScaleTracker::Direction::Forward, x,
                      tracker->next_rows(slot));
  }
  return at::empty({0}, x.options().layout(at::kStrided));
}

at::Tensor track_traced_meta(const at::Tensor& x, int64_t, int64_t, bool) {
  return at::empty({0}, x.options().layout(at::kStrided));
}

void call_traced(const at::Tensor& x, int64_t slot, int64_t id, bool backward) {
  at::AutoDispatchBelowADInplaceOrView below;
  call_operator<"track_traced">(x, slot, id, backward);
}

struct TrackHook : torch::autograd::FunctionPreHook {
  TrackHook(std::shared_ptr<ScaleTracker> tracker, int64_t slot, uint32_t output, const RunRows& rows)
      : tracker(std::move(tracker)), slot(slot), output(output), rows(rows) {}
  variable_list operator()(const variable_list& grads) override {
    if (output >= grads.size() || !grads[output].defined()) return grads;
    if (is_traced(grads[output])) {
      call_traced(grads[output], slot, tracker->id(), true);
    } else {
      tracker->record(slot, ScaleTracker::Direction::Backward, grads[output], rows);
    }
    return grads;
  }
  std::shared_ptr<ScaleTracker> tracker;
  int64_t slot;
  uint32_t output;
  RunRows rows;
};

// The end of a gradient that nobody asked for.
struct InputProbe : torch::autograd::Node {
  variable_list apply(variable_list&&) override { return {}; }
  std::string name() const override { return "plumb::track"; }
};

void watch(const at::Tensor& x, std::shared_ptr<ScaleTracker> tracker, int64_t slot, const RunRows& rows) {
  const auto output = static_cast<uint32_t>(x.output_nr());
  x.grad_fn()->add_tensor_pre_hook(std::make_unique<TrackHook>(std::move(tracker), slot, output, rows));
}

bool watched_already(const at::Tensor& x, const ScaleTracker& tracker) {
  for (const auto& hook : x.grad_fn()->tensor_pre_hooks()) {
    const auto* known = dynamic_cast<const TrackHook*>(hook.get());
    if (known && known->tracker.get() == &tracker && known->output == x.output_nr()) return true;
  }
  return false;
}

at::Tensor track(const at::Tensor& x, int64_t slot, int64_t id) {
  if (auto tracker = ScaleTracker::find(id); tracker && tracker->enabled() && tracker->wanted(slot).forward)
    tracker->record(slot, ScaleTracker::Direction::Forward, x, tracker->next_rows(slot));
  return x;
}

at::Tensor track_autograd(const at::Tensor& x, int64_t slot, int64_t id) {
  auto tracker = ScaleTracker::find(id);
  // A run of a traced program knows itself what is wanted of it.
  const bool traced = is_traced(x);
  if (!tracker || (!tracker->enabled() && !traced)) return x;
  const auto wanted = traced ? ScaleTracker::Wanted{} : tracker->wanted(slot);
  const RunRows rows = traced ? RunRows() : tracker->next_rows(slot);
  if (traced) {
    call_traced(x, slot, id, false);
  } else if (wanted.forward) {
    tracker->record(slot, ScaleTracker::Direction::Forward, x, rows);
  }
  const bool taken = x.is_floating_point() || (x.is_complex() && (wanted.keep || wanted.hash));  // as record() has it
  if (!wanted.backward || !at::GradMode::is_enabled() || !taken || x.is_inference()) return x;
  const bool input = tracker->is_input(slot);
  if (!x.requires_grad()) {
    if (!tracker->is_probed(slot) || traced) return x;
    at::Tensor alias = x.detach();
    if (x._fw_grad(0).defined()) alias._set_fw_grad(x._fw_grad(0), 0, false);
    torch::autograd::set_history(alias, make_node<InputProbe>());
    watch(alias, std::move(tracker), slot, rows);
    return alias;
  }
  // An input of a stage gets its hook where later stages' gradients are added, too: a sum of its own would round
  // otherwise.
  if ((!input || is_boundary_input(x)) && x.grad_fn() && !watched_already(x, *tracker)) {
    watch(x, std::move(tracker), slot, rows);
    return x;
  }
  // A leaf, the caller's tensor, or one also measured under another name: an alias has a gradient of its own.
  at::Tensor alias = at::alias(x);
  watch(alias, std::move(tracker), slot, rows);
  if (input || traced || !x.is_leaf()) return alias;
  // A view of a parameter that is written without gradients (by an embedding's max_norm) gets another grad_fn then,
  // which nobody watches.
  at::Tensor apart = alias.detach();
  if (x._fw_grad(0).defined()) apart._set_fw_grad(x._fw_grad(0), 0, false);
  torch::autograd::impl::set_gradient_edge(apart, torch::autograd::impl::gradient_edge(alias));
  return apart;
}

}  // namespace

const RegisterOperators tracker_rows{
    {"plumb::", "track", {.has_effects = true, .passes_through = true}},
    {"plumb::", "track_traced", {.has_effects = true}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m, "track(Tensor(a) x, int slot, int tracker=0) -> Tensor(a)", {}, track, nullptr, track_autograd);
  // Never merged, never done again.
  define(m, "track_traced(Tensor x, int slot, int tracker, bool backward) -> Tensor",
         {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded}, track_traced, track_traced_meta);
}

}  // namespace plumb
