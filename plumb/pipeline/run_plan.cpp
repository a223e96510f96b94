#include "plumb/pipeline/run_plan.h"

#include <map>
#include <set>

namespace plumb {

Schedule compute_only(const Schedule& schedule) {
  Schedule out = schedule;
  for (auto& row : out.rows) {
    std::vector<Action> kept;
    for (const auto& action : row) {
      if (!action.is_compute()) continue;
      kept.push_back(action.first_part());
      if (!action.second_part().is_idle()) kept.push_back(action.second_part());
    }
    row = std::move(kept);
  }
  return out;
}

namespace {

void find_those_that_go_back_at_once(std::vector<RunAction>& actions) {
  std::map<int, int> waiting;  // forwards by microbatch
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i].action;
    auto is = [&](size_t later, ActionKind kind) {
      if (later >= actions.size()) return false;
      const Action& other = actions[later].action;
      return other.kind == kind && other.stage == action.stage && other.microbatch == action.microbatch;
    };
    if (action.kind == ActionKind::Forward) {
      const bool whole = is(i + 1, ActionKind::FullBackward) ||
                         (is(i + 1, ActionKind::BackwardInput) && is(i + 2, ActionKind::BackwardWeight));
      const bool others = waiting.size() > waiting.count(action.microbatch);
      actions[i].goes_back_at_once = others && whole;
      ++waiting[action.microbatch];
    } else if (action.kind != ActionKind::BackwardInput && --waiting[action.microbatch] == 0) {
      waiting.erase(action.microbatch);
    }
  }
}

}  // namespace

RunPlan plan_run(const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank,
                 const std::vector<std::vector<bool>>& copy_peers) {
  RunPlan plan;
  const auto& placement = schedule.placement;
  // Every rank's row is walked alike, so both ends number the messages between them in the sender's order.
  struct Key {
    MessageKind kind;
    int from, to, microbatch;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, int> send_index, receive_index;
  for (int r = 0; r < schedule.num_ranks(); r++) {
    for (const auto& action : schedule.rows[r]) {
      const int s = action.stage, m = action.microbatch;
      auto add = [&](MessageKind kind, int to) {
        const int q = placement.rank_of(to, m);
        if (q == r || (q != rank && r != rank)) return;
        auto& list = r == rank ? plan.messages.sends : plan.messages.receives;
        (r == rank ? send_index : receive_index)[{kind, s, to, m}] = static_cast<int>(list.size());
        list.push_back({{kind, s, to, m}, r == rank ? q : r});
      };
      if (action.kind == ActionKind::Forward) {
        for (const auto& bundle : wiring[s].values_out) add(MessageKind::Activation, bundle.stage);
      } else if (action.kind != ActionKind::BackwardWeight) {
        for (const auto& bundle : wiring[s].grads_out) add(MessageKind::Gradient, bundle.stage);
      }
    }
  }
  for (size_t a = 0; a < copy_peers.size(); a++) {
    for (size_t b = 0; b < copy_peers[a].size(); b++) {
      if (!copy_peers[a][b] || a == b) continue;
      const MessageId id{MessageKind::Copies, static_cast<int>(a), static_cast<int>(b)};
      if (static_cast<int>(a) == rank) plan.messages.sends.push_back({id, static_cast<int>(b)});
      if (static_cast<int>(b) == rank) plan.messages.receives.push_back({id, static_cast<int>(a)});
    }
  }
  auto find = [](const std::map<Key, int>& index, MessageKind kind, int from, int to, int m) {
    auto it = index.find({kind, from, to, m});
    return it == index.end() ? -1 : it->second;
  };
  for (const auto& action : schedule.rows[rank]) {
    RunAction run{action, to_string(action), {}, {}};
    const int s = action.stage, m = action.microbatch;
    const auto& w = wiring[s];
    if (action.kind == ActionKind::Forward) {
      for (const auto& b : w.values_in)
        run.receives.push_back(find(receive_index, MessageKind::Activation, b.stage, s, m));
      for (const auto& b : w.values_out) run.sends.push_back(find(send_index, MessageKind::Activation, s, b.stage, m));
    } else if (action.kind != ActionKind::BackwardWeight) {
      for (const auto& b : w.grads_in)
        run.receives.push_back(find(receive_index, MessageKind::Gradient, b.stage, s, m));
      for (const auto& b : w.grads_out) run.sends.push_back(find(send_index, MessageKind::Gradient, s, b.stage, m));
    }
    plan.actions.push_back(std::move(run));
  }
  std::set<int> seen;
  for (auto run = plan.actions.rbegin(); run != plan.actions.rend(); ++run) {
    const bool adds = run->action.kind == ActionKind::FullBackward || run->action.kind == ActionKind::BackwardWeight;
    run->completes_gradients = adds && seen.insert(run->action.stage).second;
  }
  find_those_that_go_back_at_once(plan.actions);
  return plan;
}

}  // namespace plumb
