// The operator plumb::track_rounded: plumb::track, plumb::simulate_format and plumb::track in one pass over memory.
//   track_rounded(x, fwd, bwd, seed, dim, before, after, tracker)
// The slot `before` sees x and the gradient that goes to x, `after` the result and its gradient; -1: nobody asked.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "plumb/autograd/simulate_format.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/define_operator.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {
namespace {

using Direction = ScaleTracker::Direction;

// The measurements that two slots want of one pass. In: of its input, out: of its output.
class Observer {
 public:
  Observer(int64_t tracker, int64_t in, int64_t out, Direction direction, const at::Tensor& x, const RunRows& rows)
      : in_(in), out_(out), direction_(direction), rows_(rows) {
    tracker_ = ScaleTracker::find(tracker);
    if (!tracker_ || !tracker_->enabled()) return;
    bool wants_in = wants(in), wants_out = wants(out);
    if (wants_in && tracker_->takes_tensors(in, direction)) {
      tracker_->record(in, direction, x, rows);
      wants_in = false;
    }
    result_too_ = wants_out && tracker_->takes_tensors(out, direction);
    wants_out = wants_out && !result_too_;
    measuring_ = {wants_in ? &came_ : nullptr,
                  wants_out ? &went_ : nullptr,
                  {.histogram = (wants_in && tracker_->options_for(in).histogram) ||
                                (wants_out && tracker_->options_for(out).histogram)}};
  }

  const Measuring& measuring() const { return measuring_; }

  void record(const at::Tensor& result) {
    if (measuring_.before) tracker_->record(in_, direction_, came_);
    if (measuring_.after) tracker_->record(out_, direction_, went_);
    if (result_too_) tracker_->record(out_, direction_, result, rows_);
  }

 private:
  bool wants(int64_t slot) const {
    if (slot < 0) return false;
    const auto wanted = tracker_->wanted(slot);
    return direction_ == Direction::Forward ? wanted.forward : wanted.backward;
  }

  std::shared_ptr<ScaleTracker> tracker_;
  const int64_t in_, out_;
  const Direction direction_;
  const RunRows rows_;
  bool result_too_ = false;
  TensorMetrics came_, went_;
  Measuring measuring_;
};

RunRows rows_of(int64_t tracker, int64_t before, int64_t after) {
  const auto found = ScaleTracker::find(tracker);
  return found ? found->next_rows(before >= 0 ? before : after) : RunRows();
}

at::Tensor observed_forward(const at::Tensor& x, std::string_view fwd, std::optional<int64_t> seed, int64_t dim,
                            int64_t before, int64_t after, int64_t tracker, const RunRows& rows) {
  Observer observer(tracker, before, after, Direction::Forward, x, rows);
  at::Tensor result = simulate_forward(x, fwd, seed, dim, observer.measuring());
  observer.record(result);
  return result;
}

// Can be measured while it is rounded.
bool ordinary(const at::Tensor& x) {
  return x.is_cpu() && x.layout() == at::kStrided && x.is_floating_point() && !at::isTensorSubclassLike(x);
}

struct TrackRounded : torch::autograd::Function<TrackRounded> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::string fwd,
                            std::string bwd, std::optional<int64_t> seed, int64_t dim, int64_t before, int64_t after,
                            int64_t tracker) {
    at::AutoDispatchBelowADInplaceOrView below;
    seed = seed_of_passes(seed, bwd);
    context->saved_data["seed"] = seed;
    const RunRows rows = rows_of(tracker, before, after);
    context->saved_data["numbers"] = std::vector<int64_t>{dim, before, after, tracker, rows.first, rows.count};
    context->saved_data["format"] = std::move(bwd);
    return observed_forward(x, fwd, seed, dim, before, after, tracker, rows);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list& gradients) {
    torch::autograd::variable_list results(8);
    at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return results;
    const auto numbers = context->saved_data["numbers"].toIntVector();
    const auto seed = context->saved_data["seed"].toOptional<int64_t>();
    const RunRows rows{numbers[4], numbers[5]};
    const std::string& format = context->saved_data["format"].toStringRef();
    // A gradient with a history of its own, or one that is traced, is measured as it is.
    if (at::GradMode::is_enabled() || !ordinary(gradient)) {
      results[0] = format == "none" ? gradient : ops::simulate_format(gradient, format, "none", seed, numbers[0]);
      if (auto tracker = ScaleTracker::find(numbers[3]); tracker && tracker->enabled()) {
        if (tracker->wanted(numbers[2]).backward) tracker->record(numbers[2], Direction::Backward, gradient, rows);
        if (tracker->wanted(numbers[1]).backward) tracker->record(numbers[1], Direction::Backward, results[0], rows);
      }
      return results;
    }
    Observer observer(numbers[3], numbers[2], numbers[1], Direction::Backward, gradient, rows);
    results[0] = simulate_backward(gradient, format, seed, numbers[0], observer.measuring());
    observer.record(results[0]);
    return results;
  }
};

// One by one, for tensors that cannot be measured while they are rounded.
at::Tensor one_by_one(const at::Tensor& x, std::string_view fwd, std::string_view bwd, std::optional<int64_t> seed,
                      int64_t dim, int64_t before, int64_t after, int64_t tracker) {
  const at::Tensor seen = before >= 0 ? call_operator<"track">(x, before, tracker) : x;
  const at::Tensor rounded = ops::simulate_format(seen, fwd, bwd, seed, dim);
  return after >= 0 ? call_operator<"track">(rounded, after, tracker) : rounded;
}

at::Tensor track_rounded(const at::Tensor& x, std::string_view fwd, std::string_view bwd, std::optional<int64_t> seed,
                         int64_t dim, int64_t before, int64_t after, int64_t tracker) {
  if (!ordinary(x)) return one_by_one(x, fwd, bwd, seed, dim, before, after, tracker);
  at::Tensor result = observed_forward(x, fwd, seed, dim, before, after, tracker, rows_of(tracker, before, after));
  return fwd == "none" ? result.clone() : result;
}

at::Tensor track_rounded_autograd(const at::Tensor& x, std::string_view fwd, std::string_view bwd,
                                  std::optional<int64_t> seed, int64_t dim, int64_t before, int64_t after,
                                  int64_t tracker) {
  if (fwd != "none") cached_format(fwd);
  if (bwd != "none") cached_format(bwd);
  require_plain_autograd("plumb::simulate_format", x);
  if (!ordinary(x)) return one_by_one(x, fwd, bwd, seed, dim, before, after, tracker);
  if (at::GradMode::is_enabled() && x.requires_grad())
    return TrackRounded::apply(x, std::string(fwd), std::string(bwd), seed, dim, before, after, tracker);
  at::AutoDispatchBelowADInplaceOrView below;
  return track_rounded(x, fwd, bwd, seed, dim, before, after, tracker);
}

at::Tensor track_rounded_meta(const at::Tensor& x, std::string_view, std::string_view, std::optional<int64_t>, int64_t,
                              int64_t, int64_t, int64_t) {
  return at::empty_like(x);
}

}  // namespace

const RegisterOperators track_rounded_rows{
    {"plumb::", "track_rounded", {.has_effects = true, .passes_through = true}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "track_rounded(Tensor x, str fwd, str bwd, int? seed, int dim, int before, int after, int tracker) -> Tensor",
         {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded}, track_rounded, track_rounded_meta,
         track_rounded_autograd);
}

}  // namespace plumb
