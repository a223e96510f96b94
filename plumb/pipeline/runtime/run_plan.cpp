#include "plumb/pipeline/runtime/run_plan.h"

#include <algorithm>
#include <map>
#include <set>

#include "plumb/schedule/lower.h"

namespace plumb {
namespace {

// Every value's users, ascending.
std::map<ValueSource, std::vector<int>> users_of_values(const PipeTable& table) {
  std::map<ValueSource, std::vector<int>> users;
  for (int s = 0; s < table.num_stages(); s++) {
    for (const auto& in : table.stages[s].inputs) {
      auto& list = users[in.source];
      if (list.empty() || list.back() != s) list.push_back(s);
    }
  }
  return users;
}

template <typename Bundles>
auto& bundle_for(Bundles& bundles, int stage) {
  for (auto& b : bundles) {
    if (b.stage == stage) return b;
  }
  return bundles.emplace_back(typename Bundles::value_type{stage, {}});
}

}  // namespace

std::vector<StageWiring> connect_stages(const PipeTable& table) {
  table.check();
  std::vector<StageWiring> wiring(table.stages.size());
  for (int s = 0; s < table.num_stages(); s++) {
    auto& w = wiring[s];
    w.output_used.assign(table.stages[s].outputs.size(), false);
    for (const auto& in : table.stages[s].inputs) {
      auto at = std::ranges::find(w.sources, in.source);
      w.source_of_input.push_back(static_cast<int>(at - w.sources.begin()));
      if (at == w.sources.end()) w.sources.push_back(in.source);
    }
  }
  const auto users = users_of_values(table);
  auto source_index = [&](int stage, const ValueSource& value) {
    const auto& sources = wiring[stage].sources;
    return static_cast<int>(std::ranges::find(sources, value) - sources.begin());
  };
  for (int s = 0; s < table.num_stages(); s++) {
    auto& w = wiring[s];
    for (int i = 0; i < static_cast<int>(w.sources.size()); i++) {
      const auto& value = w.sources[i];
      if (value.stage < 0) continue;
      auto& maker = wiring[value.stage];
      maker.output_used[value.index] = true;
      bundle_for(w.values_in, value.stage).indices.push_back(i);
      bundle_for(maker.values_out, s).indices.push_back(static_cast<int>(value.index));
      const auto& list = users.at(value);
      const auto at = std::ranges::find(list, s);
      const int to = at == list.begin() ? value.stage : *(at - 1);
      bundle_for(w.grads_out, to).indices.push_back(i);
      bundle_for(wiring[to].grads_in, s)
          .targets.push_back(to == value.stage ? StageWiring::GradBundle::Target{true, static_cast<int>(value.index)}
                                               : StageWiring::GradBundle::Target{false, source_index(to, value)});
    }
  }
  auto ascending = [](const auto& a, const auto& b) { return a.stage < b.stage; };
  for (auto& w : wiring) {
    std::ranges::sort(w.values_out, ascending);
    std::ranges::sort(w.values_in, ascending);
    std::ranges::sort(w.grads_out, [](const auto& a, const auto& b) { return a.stage > b.stage; });
  }
  return wiring;
}

StageEdges edges_of(const std::vector<StageWiring>& wiring) {
  StageEdges edges;
  for (int s = 0; s < static_cast<int>(wiring.size()); s++) {
    std::set<int> later;
    for (const auto& bundle : wiring[s].values_out) later.insert(bundle.stage);
    for (const auto& bundle : wiring[s].grads_in) later.insert(bundle.stage);
    for (const int to : later) edges.push_back({s, to});
  }
  return edges;
}

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

using Indices = std::map<MessageId, int>;

bool goes_back_to_inputs(const Action& action) {
  return action.kind == ActionKind::FullBackward || action.kind == ActionKind::BackwardInput;
}

void add_compute_messages(const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank, RunPlan& plan,
                          Indices& send_index, Indices& receive_index) {
  const auto& placement = schedule.placement;
  // Every rank's row is walked alike, so both ends number the messages between them in the sender's order.
  for (int r = 0; r < schedule.num_ranks(); r++) {
    auto walk = [&](const Action& action) {
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
      } else if (goes_back_to_inputs(action)) {
        plan.messages.has_backward = true;
        for (const auto& bundle : wiring[s].grads_out) add(MessageKind::Gradient, bundle.stage);
      }
    };
    for (const auto& action : schedule.rows[r]) {
      walk(action.first_part());
      walk(action.second_part());
    }
  }
}

void add_tied_gradients(const std::vector<std::vector<bool>>& copy_peers, int rank, MessagePlan& messages) {
  for (size_t a = 0; a < copy_peers.size(); a++) {
    for (size_t b = 0; b < copy_peers[a].size(); b++) {
      if (!copy_peers[a][b] || a == b) continue;
      const MessageId id{MessageKind::TiedGradients, static_cast<int>(a), static_cast<int>(b)};
      if (static_cast<int>(a) == rank) messages.sends.push_back({id, static_cast<int>(b)});
      if (static_cast<int>(b) == rank) messages.receives.push_back({id, static_cast<int>(a)});
    }
  }
}

RunAction plan_action(const Action& action, const StageWiring& w, const Indices& send_index,
                      const Indices& receive_index, const ActionHooks& hooks) {
  RunAction run{action, to_string(action), {}, {}};
  run.hook = find_hook(hooks, action.kind, action.stage);
  run.hooked = action;
  const int s = action.stage, m = action.microbatch;
  auto find = [m](const Indices& index, MessageKind kind, int from, int to) {
    auto it = index.find({kind, from, to, m});
    return it == index.end() ? -1 : it->second;
  };
  if (action.kind == ActionKind::Forward) {
    for (const auto& b : w.values_in) run.receives.push_back(find(receive_index, MessageKind::Activation, b.stage, s));
    for (const auto& b : w.values_out) run.sends.push_back(find(send_index, MessageKind::Activation, s, b.stage));
  } else if (goes_back_to_inputs(action)) {
    for (const auto& b : w.grads_in) run.receives.push_back(find(receive_index, MessageKind::Gradient, b.stage, s));
    for (const auto& b : w.grads_out) run.sends.push_back(find(send_index, MessageKind::Gradient, s, b.stage));
  }
  return run;
}

}  // namespace

RunPlan plan_run(const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank,
                 const std::vector<std::vector<bool>>& copy_peers, const ActionHooks& hooks) {
  RunPlan plan;
  Indices send_index, receive_index;
  add_compute_messages(schedule, wiring, rank, plan, send_index, receive_index);
  add_tied_gradients(copy_peers, rank, plan.messages);
  for (const auto& action : schedule.rows[rank]) {
    if (action.is_idle() || action.is_message()) continue;
    // The engine itself knows when a stage's gradients are complete.
    if (!action.is_compute() &&
        (action.kind == ActionKind::ReduceGrad || !find_hook(hooks, action.kind, action.stage))) {
      continue;
    }
    const bool pair = action.kind == ActionKind::Overlap;
    const size_t first = plan.actions.size();
    for (const Action& part : {action.first_part(), action.second_part()}) {
      if (!part.is_idle())
        plan.actions.push_back(plan_action(part, wiring[part.stage], send_index, receive_index, hooks));
    }
    const ActionHook* together = pair ? find_hook(hooks, ActionKind::Overlap, action.stage) : nullptr;
    if (together == nullptr) continue;
    auto& run = plan.actions[first];
    run.hook = together;
    run.together = 2;
    run.hooked = action;
  }
  std::set<int> seen;
  for (auto run = plan.actions.rbegin(); run != plan.actions.rend(); ++run) {
    const bool adds = run->action.kind == ActionKind::FullBackward || run->action.kind == ActionKind::BackwardWeight;
    run->completes_gradients = adds && seen.insert(run->action.stage).second;
  }
  std::vector<Action> row;
  for (const RunAction& run : plan.actions) row.push_back(run.action);
  const std::vector<bool> next = backward_is_next(row);
  for (size_t i = 0; i < next.size(); ++i) plan.actions[i].backward_is_next = next[i];
  return plan;
}

void order_messages(RunPlan& plan, const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank) {
  using End = MessagePlan::End;
  auto& messages = plan.messages;
  std::map<std::pair<bool, MessageId>, int> indices;
  const auto note = [&](bool sends, const std::vector<PlannedMessage>& list) {
    for (size_t i = 0; i < list.size(); i++) indices[{sends, list[i].id}] = static_cast<int>(i);
  };
  note(true, messages.sends);
  note(false, messages.receives);
  // Pairs stay whole, as hooks of some ranks may run them as one.
  Schedule computing = schedule;
  for (auto& row : computing.rows) std::erase_if(row, [](const Action& a) { return !a.is_compute(); });
  const Schedule lowered = lower_schedule(computing, edges_of(wiring), {.keep_pairs = true});
  const std::vector<int> meets = meeting_messages(lowered)[rank];
  const auto& row = lowered.rows[rank];
  int last = -1;  // the entry whose message is the last one in the order
  for (size_t i = 0; i < row.size(); i++) {
    const Action& action = row[i];
    if (!action.is_message()) continue;
    const bool forward = action.kind == ActionKind::SendForward || action.kind == ActionKind::RecvForward;
    const int from = action.is_send() ? action.stage : action.other_stage,
              to = action.stage + action.other_stage - from;
    const auto it = indices.find(
        {action.is_send(), {forward ? MessageKind::Activation : MessageKind::Gradient, from, to, action.microbatch}});
    if (it == indices.end()) continue;  // a value goes straight to its users, its gradient from user to user
    const bool joins = last >= 0 && meets[i] == last && last < static_cast<int>(i);
    if (!joins) messages.order.emplace_back();
    messages.order.back().push_back({action.is_send(), it->second});
    last = static_cast<int>(i);
  }
  std::map<int, std::vector<End>> tied;  // by the other rank: both ways meet
  for (const auto& [key, index] : indices) {
    if (key.second.kind != MessageKind::TiedGradients) continue;
    tied[key.first ? key.second.to : key.second.from].push_back({key.first, index});
  }
  for (auto& [peer, ends] : tied) messages.order.push_back(std::move(ends));
}

}  // namespace plumb
