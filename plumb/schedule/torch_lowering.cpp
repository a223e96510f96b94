#include "plumb/schedule/torch_lowering.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

bool makes_input_gradient(const Action& a) {
  return a.kind == ActionKind::BackwardInput || a.kind == ActionKind::FullBackward;
}

// Values that a rank has made, sent and received, by stage and microbatch.
struct Known {
  std::set<std::tuple<ActionKind, int, int>> all;  // of backwards the input half

  void add(const Action& a) {
    all.insert({makes_input_gradient(a) ? ActionKind::BackwardInput : a.kind, a.stage, a.microbatch});
  }
  bool has(ActionKind kind, int stage, int microbatch) const { return all.count({kind, stage, microbatch}) > 0; }
  // Returns whether the value that a forward or backward starts from is here.
  bool has_input(const Action& a, int num_stages) const {
    if (a.kind == ActionKind::Forward) {
      return a.stage == 0 || has(ActionKind::RecvForward, a.stage, a.microbatch) ||
             has(ActionKind::Forward, a.stage - 1, a.microbatch);
    }
    return !makes_input_gradient(a) || a.stage == num_stages - 1 ||
           has(ActionKind::RecvBackward, a.stage, a.microbatch) ||
           has(ActionKind::BackwardInput, a.stage + 1, a.microbatch);
  }
};

[[noreturn]] void raise_stuck(const Schedule& schedule, const std::vector<std::size_t>& next) {
  std::string text;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    if (next[rank] >= schedule.rows[rank].size()) continue;
    text += str(text.empty() ? "rank " : ", rank ", rank, " at ", to_string(schedule.rows[rank][next[rank]]));
  }
  throw Error(ErrorKind::Schedule, "the schedule " + schedule.name + " stops: nothing can run of " + text, "",
              "check the table; every entry needs its input from an entry before it");
}

void check_ranks(const Schedule& schedule) {
  for (int rank : schedule.placement.ranks) {
    if (rank < 0 || rank >= schedule.num_ranks()) {
      throw Error(ErrorKind::Schedule, str("the schedule ", schedule.name, " has a stage on rank ", rank,
                                           " and rows for ", schedule.num_ranks(), " ranks"));
    }
  }
  for (const auto& row : schedule.rows) {
    for (const Action& a : row) {
      const int stages = schedule.num_stages();
      if (!a.is_idle() && (a.stage < 0 || a.stage >= stages || a.other_stage >= stages)) {
        throw Error(ErrorKind::Schedule,
                    str("the schedule ", schedule.name, " has ", stages, " stages, and an entry ", to_string(a)));
      }
    }
  }
}

}  // namespace

Schedule add_send_recv(const Schedule& schedule) {
  check_ranks(schedule);
  const int stages = schedule.num_stages();
  Schedule lowered = schedule;
  for (auto& row : lowered.rows) row.clear();
  std::vector<Known> known(schedule.rows.size());
  std::vector<std::size_t> next(schedule.rows.size(), 0);
  auto put = [&](int rank, const Action& action) {
    lowered.rows[rank].push_back(action);
    known[rank].add(action);
  };
  auto send = [&](int rank, const Action& part) {
    const bool forward = part.kind == ActionKind::Forward;
    if (!forward && !makes_input_gradient(part)) return;
    const int to = forward ? part.stage + 1 : part.stage - 1;
    if (to < 0 || to >= stages) return;
    const int peer = schedule.placement.rank_of(to, part.microbatch);
    if (peer == rank) return;
    using K = ActionKind;
    put(rank, Action::message(forward ? K::SendForward : K::SendBackward, part.stage, part.microbatch, to));
    put(peer, Action::message(forward ? K::RecvForward : K::RecvBackward, to, part.microbatch, part.stage));
  };
  for (bool left = true; left;) {
    bool progress = false;
    left = false;
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      const auto& row = schedule.rows[rank];
      if (next[rank] >= row.size()) continue;
      left = true;
      const Action& action = row[next[rank]];
      const Action first = action.first_part(), second = action.second_part();
      if (!known[rank].has_input(first, stages) || !known[rank].has_input(second, stages)) continue;
      progress = true;
      ++next[rank];
      if (action.is_idle()) continue;
      lowered.rows[rank].push_back(action);
      for (const Action& part : {first, second}) {
        known[rank].add(part);
        send(rank, part);
      }
    }
    if (left && !progress) raise_stuck(schedule, next);
  }
  return lowered;
}

Schedule simulate_send_recv(const Schedule& given) {
  const Schedule schedule = without_idle(given);
  check_ranks(schedule);
  const int stages = schedule.num_stages();
  Schedule played = schedule;
  for (auto& row : played.rows) row.clear();
  std::vector<Known> known(schedule.rows.size());
  std::vector<std::size_t> next(schedule.rows.size(), 0);
  auto ready = [&](int rank, const Action& a) {
    auto other = [&]() -> const Known& { return known[schedule.placement.rank_of(a.other_stage, a.microbatch)]; };
    switch (a.kind) {
      case ActionKind::SendForward: return known[rank].has(ActionKind::Forward, a.stage, a.microbatch);
      case ActionKind::SendBackward: return known[rank].has(ActionKind::BackwardInput, a.stage, a.microbatch);
      case ActionKind::RecvForward: return other().has(ActionKind::SendForward, a.other_stage, a.microbatch);
      case ActionKind::RecvBackward: return other().has(ActionKind::SendBackward, a.other_stage, a.microbatch);
      default: return known[rank].has_input(a.first_part(), stages) && known[rank].has_input(a.second_part(), stages);
    }
  };
  auto run = [&](int rank) {
    const Action& action = schedule.rows[rank][next[rank]];
    if (!ready(rank, action)) return false;
    known[rank].add(action.first_part());
    known[rank].add(action.second_part());
    ++next[rank];
    return true;
  };
  while (true) {
    bool left = false, progress = false;
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      const auto& row = schedule.rows[rank];
      if (next[rank] >= row.size()) continue;
      left = true;
      const bool ran = run(rank);
      progress |= ran;
      played.rows[rank].push_back(ran ? row[next[rank] - 1] : Action::idle());
    }
    if (!left) return played;
    if (!progress) raise_stuck(schedule, next);
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      if (next[rank] >= schedule.rows[rank].size() || !played.rows[rank].back().is_idle()) continue;
      if (run(rank)) played.rows[rank].back() = schedule.rows[rank][next[rank] - 1];
    }
  }
}

Schedule defer_receives(const Schedule& schedule) {
  check_ranks(schedule);
  Schedule late = schedule;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    auto& row = late.rows[rank];
    row.clear();
    std::vector<Action> held;
    auto release = [&](auto&& wanted) {
      for (const Action& a : held) {
        if (wanted(a)) row.push_back(a);
      }
      std::erase_if(held, wanted);
    };
    auto peer = [&](const Action& a) { return schedule.placement.rank_of(a.other_stage, a.microbatch); };
    for (const Action& action : schedule.rows[rank]) {
      if (action.is_receive()) {
        held.push_back(action);
        continue;
      }
      if (action.is_send() && rank < peer(action)) {
        const int to = peer(action);
        release([&](const Action& a) { return peer(a) == to; });
      }
      for (const Action& part : {action.first_part(), action.second_part()}) {
        const bool forward = part.kind == ActionKind::Forward;
        if (!forward && !makes_input_gradient(part)) continue;
        release([&](const Action& a) {
          return a.kind == (forward ? ActionKind::RecvForward : ActionKind::RecvBackward) && a.stage == part.stage &&
                 a.microbatch == part.microbatch;
        });
      }
      row.push_back(action);
    }
    if (!held.empty()) {
      throw Error(ErrorKind::Schedule, str("rank ", rank, " of the schedule ", schedule.name, " receives ",
                                           to_string(held[0]), " and nothing after it uses that"));
    }
  }
  return late;
}

}  // namespace plumb
