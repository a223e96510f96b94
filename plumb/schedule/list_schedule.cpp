#include "plumb/schedule/list_schedule.h"

#include <algorithm>

namespace plumb::schedule_internal {
namespace {

constexpr double kSame = 1e-12;  // shorter differences of time are none

}  // namespace

double peak_of_row(const StageTimes& times, int rank, const std::vector<Action>& row) {
  RankMemory memory(times.costs, times.resident[rank]);
  for (const Action& action : row) memory.run(action.kind, action.stage);
  return memory.peak();
}

void TableTimer::begin(const StageTimes& times, double give_up) {
  times_ = &times;
  give_up_ = give_up * (1 + 1e-9);  // sums in another order differ by less
  const std::size_t stages = times.rank.size(), ranks = times.resident.size();
  stages_.assign(stages, {});
  forward_end_.assign(stages * microbatches_, kForever);
  back_end_.assign(stages * microbatches_, kForever);
  free_.assign(ranks, 0);
  left_.assign(ranks, 0);
  after_forward_.assign(stages, 0);
  after_back_.assign(stages, 0);
  if (give_up == kForever) return;
  const auto back = [&](std::size_t s) { return std::min(times.costs.input[s], times.costs.full[s]); };
  const auto message = [&](std::size_t s) {
    return times.rank[s] == times.rank[s + 1] ? 0 : times.costs.communication[s];
  };
  for (std::size_t s = 1; s < stages; ++s) after_back_[s] = after_back_[s - 1] + back(s - 1) + message(s - 1);
  after_forward_[stages - 1] = after_back_[stages - 1] + back(stages - 1);
  for (std::size_t s = stages - 1; s-- > 0;)
    after_forward_[s] = after_forward_[s + 1] + times.costs.forward[s + 1] + message(s);
}

// Counts an action; returns true if its rank, or its microbatch, cannot end by give_up_ any more.
bool TableTimer::too_late(int rank, int stage, ActionKind kind, double end) {
  ++actions_;
  left_[rank] -= length_of(times_->costs, kind, stage);
  const double after = kind == ActionKind::Forward          ? after_forward_[stage]
                       : kind == ActionKind::BackwardWeight ? 0
                                                            : after_back_[stage];
  return end + std::max(after, left_[rank]) > give_up_;
}

double TableTimer::ready_forward(int stage, int m) const {
  if (stage == 0) return 0;
  const bool here = times_->rank[stage] == times_->rank[stage - 1];
  return at(forward_end_, stage - 1, m) + (here ? 0 : times_->costs.communication[stage - 1]);
}

double TableTimer::ready_backward(int stage, int m) const {
  const int last = static_cast<int>(times_->rank.size()) - 1;
  if (stage == last) return at(forward_end_, stage, m);
  const bool here = times_->rank[stage] == times_->rank[stage + 1];
  return at(back_end_, stage + 1, m) + (here ? 0 : times_->costs.communication[stage]);
}

// Returns the memory that forwards leave free: for what actions work in, and for gradients that have not come yet.
double TableTimer::reserved(int rank) const {
  double gradients = 0;
  for (const int s : held_[rank]) {
    const StageState& state = stages_[s];
    if (!habits_->ahead && (habits_->halves[s] ? state.weights : state.backs) == 0)
      gradients += times_->costs.gradient[s];
  }
  return gradients + working_[rank];
}

// A backward goes before a forward that can begin as early.
TableTimer::Choice TableTimer::choose(int rank) const {
  Choice best{kForever, kForever, -1, ActionKind::Idle};
  const auto take = [&](double ready, double priority, int stage, ActionKind kind) {
    if (ready == kForever) return;
    const double start = std::max(free_[rank], ready);
    const bool same = start <= best.start + kSame && best.stage >= 0;
    if (start < best.start - kSame || (same && priority < best.priority)) best = {start, priority, stage, kind};
  };
  const int count = static_cast<int>(times_->rank.size());
  const double kept = reserved(rank),
               room = times_->resident[rank] + (limit_ - times_->resident[rank]) * habits_->share;
  for (const int s : held_[rank]) {
    const StageState& state = stages_[s];
    if (state.backs < state.forwards) {
      const int m = state.backs;
      take(ready_backward(s, m), -1e9 + static_cast<double>(m) * count + (count - s), s,
           habits_->halves[s] ? ActionKind::BackwardInput : ActionKind::FullBackward);
    }
    if (state.forwards == microbatches_) continue;
    if (memory_[rank].held() + memory_change(times_->costs, ActionKind::Forward, s) + kept >
        std::min(limit_, room) * (1 + 1e-9))
      continue;
    const int m = state.forwards, group = habits_->group, deep = habits_->deep_first ? count - 1 - s : s;
    take(ready_forward(s, m), static_cast<double>(m / group) * count * group + deep * group + m % group, s,
         ActionKind::Forward);
  }
  consider_weights(rank, best);
  return best;
}

// Weight halves go into waits that they fill, where nothing else can run, or at once.
void TableTimer::consider_weights(int rank, Choice& best) const {
  const double now = free_[rank];
  const bool at_once = habits_->gap < 0;
  double first = kForever;
  int stage = -1;
  for (const int s : held_[rank]) {
    const StageState& state = stages_[s];
    if (!habits_->halves[s] || state.weights == state.backs) continue;
    const double order = static_cast<double>(state.weights) * static_cast<double>(times_->rank.size()) + s;
    const bool fills = best.stage < 0 || at_once || best.start - now >= habits_->gap * times_->costs.weight[s];
    const bool waits = best.stage < 0 || at_once || best.start > now + kSame;
    if (fills && waits && order < first) first = order, stage = s;
  }
  if (stage >= 0) best = {now, -1e10, stage, ActionKind::BackwardWeight};
}

double TableTimer::run(int rank, const Choice& choice) {
  const int s = choice.stage;
  StageState& state = stages_[s];
  const double end = choice.start + length_of(times_->costs, choice.kind, s);
  free_[rank] = end;
  memory_[rank].run(choice.kind, s);
  if (choice.kind == ActionKind::Forward) {
    at(forward_end_, s, state.forwards++) = end;
  } else if (choice.kind == ActionKind::BackwardWeight) {
    ++state.weights;
  } else {
    at(back_end_, s, state.backs++) = end;
  }
  return end;
}

double TableTimer::make(const StageTimes& times, const ListHabits& habits, double memory_limit, TableRows* rows,
                        double give_up) {
  begin(times, give_up);
  habits_ = &habits;
  limit_ = memory_limit;
  const int count = static_cast<int>(times.rank.size()), ranks = static_cast<int>(times.resident.size());
  memory_.clear();
  held_.assign(ranks, {});
  working_.assign(ranks, 0);
  std::size_t left = 0;
  for (int s = 0; s < count; ++s) {
    held_[times.rank[s]].push_back(s);
    working_[times.rank[s]] = std::max(working_[times.rank[s]], most_working(times.costs, s));
    left += static_cast<std::size_t>(microbatches_) * (habits.halves[s] ? 3 : 2);
    left_[times.rank[s]] +=
        microbatches_ * (times.costs.forward[s] +
                         (habits.halves[s] ? times.costs.input[s] + times.costs.weight[s] : times.costs.full[s]));
  }
  if (rows) rows->assign(ranks, {});
  std::vector<Choice> next;
  for (int k = 0; k < ranks; ++k) {
    if (held_[k].empty() || times.resident[k] > memory_limit * (1 + 1e-9)) return kForever;
    memory_.emplace_back(times.costs, times.resident[k]);
    next.push_back({});
  }
  for (int k = 0; k < ranks; ++k) next[k] = choose(k);
  double length = 0;
  for (; left > 0; --left) {
    int rank = 0;
    for (int k = 1; k < ranks; ++k) {
      if (next[k].start < next[rank].start) rank = k;
    }
    const Choice choice = next[rank];
    if (choice.stage < 0) return kForever;
    const StageState& state = stages_[choice.stage];
    const int m = choice.kind == ActionKind::Forward          ? state.forwards
                  : choice.kind == ActionKind::BackwardWeight ? state.weights
                                                              : state.backs;
    if (rows) (*rows)[rank].push_back({.kind = choice.kind, .stage = choice.stage, .microbatch = m});
    const double end = run(rank, choice);
    if (too_late(rank, choice.stage, choice.kind, end)) return kForever;
    length = std::max(length, end);
    next[rank] = choose(rank);
    // Another rank may choose anew, now that it knows when this comes.
    const int to = choice.kind == ActionKind::Forward ? choice.stage + 1 : choice.stage - 1;
    if (choice.kind == ActionKind::BackwardWeight || to < 0 || to >= count) continue;
    if (times.rank[to] != rank) next[times.rank[to]] = choose(times.rank[to]);
  }
  for (const RankMemory& memory : memory_) {
    if (memory.peak() > memory_limit * (1 + 1e-9)) return kForever;
  }
  return length;
}

double TableTimer::replay(const StageTimes& times, const TableRows& rows, double give_up,
                          std::vector<std::vector<double>>* ends) {
  begin(times, give_up);
  if (ends) ends->resize(rows.size());
  const int ranks = static_cast<int>(rows.size());
  next_.assign(rows.size(), 0);
  std::size_t left = 0;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    left += rows[rank].size();
    if (give_up < kForever)
      for (const Action& action : rows[rank]) left_[rank] += length_of(times.costs, action.kind, action.stage);
    if (ends) (*ends)[rank].resize(rows[rank].size());
  }
  double length = 0;
  std::size_t stuck = 0;  // passes in which nothing ran
  for (bool up = false; left > 0;) {
    const std::size_t before = left;
    up = !up;  // forwards go up the ranks, backwards down
    for (int k = 0; k < ranks; ++k) {
      const int rank = up ? k : ranks - 1 - k;
      const auto& row = rows[rank];
      for (std::size_t& i = next_[rank]; i < row.size(); ++i, --left) {
        const Action& action = row[i];
        const int s = action.stage, m = action.microbatch;
        double ready = 0;
        if (action.kind == ActionKind::Forward) ready = ready_forward(s, m);
        if (action.kind == ActionKind::BackwardInput || action.kind == ActionKind::FullBackward)
          ready = std::max(ready_backward(s, m), at(forward_end_, s, m));
        if (action.kind == ActionKind::BackwardWeight) ready = at(back_end_, s, m);
        if (ready == kForever) break;
        const double end = std::max(free_[rank], ready) + length_of(times.costs, action.kind, s);
        free_[rank] = end;
        if (too_late(rank, s, action.kind, end)) return kForever;
        length = std::max(length, end);
        if (ends) (*ends)[rank][i] = end;
        if (action.kind == ActionKind::Forward) at(forward_end_, s, m) = end;
        if (action.kind == ActionKind::BackwardInput || action.kind == ActionKind::FullBackward)
          at(back_end_, s, m) = end;
      }
    }
    stuck = left == before ? stuck + 1 : 0;
    if (stuck == 2) return kForever;
  }
  return length;
}

}  // namespace plumb::schedule_internal
