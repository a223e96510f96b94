// The memory of a rank, action by action. Simulator, checker and searches count by it. For this room.
#pragma once

#include <algorithm>
#include <vector>

#include "plumb/schedule/simulate.h"

namespace plumb::schedule_internal {

// Returns these costs without Costs::values that go to another rank. Both have one entry a stage.
inline Costs with_values_of_ranks(Costs costs, const std::vector<int>& ranks) {
  for (std::size_t s = 0; s < costs.values.size(); ++s) {
    if (s + 1 >= ranks.size() || ranks[s] != ranks[s + 1]) costs.values[s] = 0;
  }
  return costs;
}

// Returns what an action leaves behind or lets go, in the unit of costs.activation, but for the gradients that come
// with a stage's first weight backward. `costs` has one entry a stage, and Costs::values for stages of this rank alone.
inline double memory_change(const Costs& costs, ActionKind kind, int stage) {
  const double size = costs.activation[stage], held = size * costs.held_for_weight[stage];
  const double going_on = costs.values[stage] - (stage > 0 ? costs.values[stage - 1] : 0);
  switch (kind) {
    case ActionKind::Forward: return size + going_on;
    case ActionKind::BackwardInput: return held - size - going_on;
    case ActionKind::BackwardWeight: return -held;
    default: return -size - going_on;
  }
}

// The lists of Costs::Working.
inline constexpr std::vector<double> Costs::Working::*kWorking[] = {
    &Costs::Working::forward, &Costs::Working::input,        &Costs::Working::weight,
    &Costs::Working::full,    &Costs::Working::first_weight, &Costs::Working::first_full};

// Counts along a rank's row. Time plays no part: a rank does one thing after the other.
class RankMemory {
 public:
  // `costs` has one entry a stage and outlives this; `resident`: there from the beginning.
  explicit RankMemory(const Costs& costs, double resident = 0)
      : costs_(&costs), held_(resident), peak_(resident), has_gradients_(costs.activation.size(), 0) {}

  // Returns true if that is more than there ever was.
  bool run(ActionKind kind, int stage) {
    const double before = held_;
    const bool weights = kind != ActionKind::Forward && kind != ActionKind::BackwardInput;
    const bool first = weights && has_gradients_[stage] == 0;
    held_ += memory_change(*costs_, kind, stage) + (first ? costs_->gradient[stage] : 0);
    if (first) has_gradients_[stage] = 1;
    const Costs::Working& of = costs_->working;
    const auto& working = kind == ActionKind::Forward          ? of.forward
                          : kind == ActionKind::BackwardInput  ? of.input
                          : kind == ActionKind::BackwardWeight ? (first ? of.first_weight : of.weight)
                                                               : (first ? of.first_full : of.full);
    const double most = std::max(before, held_) + working[stage];
    if (most <= peak_) return false;
    peak_ = most;
    return true;
  }
  double held() const { return held_; }
  double peak() const { return peak_; }

 private:
  const Costs* costs_;
  double held_, peak_;
  std::vector<char> has_gradients_;  // by stage
};

}  // namespace plumb::schedule_internal
