// The memory of a rank, action by action. Simulator, checker and searches count by it. For this room.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "plumb/schedule/simulate.h"

namespace plumb::schedule_internal {

// Costs with one entry a stage, for stages that are on these ranks: actions have the copies of messages, `values` stay
// on their rank, `sent` go to another.
struct RankCosts : Costs {
  RankCosts() = default;
  RankCosts(Costs costs, const std::vector<int>& ranks) : Costs(std::move(costs)), sent(values.size(), 0) {
    for (std::size_t s = 0; s + 1 < values.size(); ++s) {
      if (ranks[s] == ranks[s + 1]) continue;
      std::swap(values[s], sent[s]);
      for (const std::size_t end : {s, s + 1}) {
        for (auto* list : {&forward, &input, &full}) (*list)[end] += copies[s];
      }
    }
    if (!values.empty()) values.back() = 0;
    std::ranges::fill(copies, 0);
  }
  std::vector<double> sent;
};

// Returns how long a forward or a backward takes.
inline double length_of(const Costs& costs, ActionKind kind, int stage) {
  return kind == ActionKind::Forward         ? costs.forward[stage]
         : kind == ActionKind::BackwardInput ? costs.input[stage]
         : kind == ActionKind::FullBackward  ? costs.full[stage]
                                             : costs.weight[stage];
}

// Returns the stage that an action makes values or gradients for, and the one that it has them from. Negative, or the
// number of stages: none.
inline int stage_after(ActionKind kind, int stage) {
  return kind == ActionKind::Forward ? stage + 1 : kind == ActionKind::BackwardWeight ? -1 : stage - 1;
}
inline int stage_before(ActionKind kind, int stage) {
  return kind == ActionKind::Forward ? stage - 1 : kind == ActionKind::BackwardWeight ? -1 : stage + 1;
}

// Returns the entry of what an action makes for another stage, and of what it has from one. The last entry is 0.
inline double made_by(ActionKind kind, int stage, const std::vector<double>& values) {
  const int to = stage_after(kind, stage);
  return to < 0 ? 0 : values[std::min(stage, to)];
}
inline double taken_by(ActionKind kind, int stage, const std::vector<double>& values) {
  const int from = stage_before(kind, stage);
  return from < 0 ? 0 : values[std::min(stage, from)];
}

// Returns what an action leaves behind or lets go, in the unit of costs.activation, but for the gradients that come
// with a stage's first weight backward.
inline double memory_change(const RankCosts& costs, ActionKind kind, int stage) {
  const double size = costs.activation[stage], held = size * costs.held_for_weight[stage];
  const double own = kind == ActionKind::Forward          ? size
                     : kind == ActionKind::BackwardInput  ? held - size
                     : kind == ActionKind::BackwardWeight ? -held
                                                          : -size;
  return own + made_by(kind, stage, costs.values) - taken_by(kind, stage, costs.values);
}

// The lists of Costs::Working.
inline constexpr std::vector<double> Costs::Working::*kWorking[] = {
    &Costs::Working::forward, &Costs::Working::input,        &Costs::Working::weight,
    &Costs::Working::full,    &Costs::Working::first_weight, &Costs::Working::first_full};

// Returns the most that an action of the stage takes while it runs.
inline double most_working(const Costs& costs, int stage) {
  double most = 0;
  for (const auto list : kWorking) most = std::max(most, (costs.working.*list)[stage]);
  return most;
}

// Counts along a rank's row. Time plays no part: a rank does one thing after the other.
class RankMemory {
 public:
  // `costs` outlives this; `resident`: there from the beginning.
  explicit RankMemory(const RankCosts& costs, double resident = 0)
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
    // The values that come and go are part of what it works in. At the end they are copied to a message.
    const double without = std::max(before - taken_by(kind, stage, costs_->values),  //
                                    held_ - made_by(kind, stage, costs_->values));
    const double most = std::max({before, held_ + 2 * made_by(kind, stage, costs_->sent), without + working[stage]});
    if (most <= peak_) return false;
    peak_ = most;
    return true;
  }
  // Adds memory that is no action's; negative: it is let go.
  void hold(double more) { held_ += more; }
  double held() const { return held_; }
  double peak() const { return peak_; }

 private:
  const RankCosts* costs_;
  double held_, peak_;
  std::vector<char> has_gradients_;  // by stage
};

// Returns the most memory a rank's row takes, messages that wait included, in the unit of costs.activation, and the
// entry that gets there first (-1 if nothing is ever held).
std::pair<double, int> peak_memory(const Schedule& schedule, int rank, const RankCosts& costs);

}  // namespace plumb::schedule_internal
