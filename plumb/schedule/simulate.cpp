#include "plumb/schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/event_simulation.h"
#include "plumb/schedule/rank_memory.h"

namespace plumb {
namespace {

std::vector<double> spread(const std::vector<double>& values, int num_stages, const char* what) {
  std::size_t count = static_cast<std::size_t>(num_stages);
  if (values.size() != 1 && values.size() != count) {
    throw Error(ErrorKind::InvalidArgument,
                str("the ", what, " costs have ", values.size(), " entries for ", num_stages, " stages"), "",
                "give one for all stages or one a stage");
  }
  for (double value : values) {
    if (!std::isfinite(value) || value < 0) {
      throw Error(ErrorKind::InvalidArgument, str("the ", what, " cost ", value, " is below zero or not finite"));
    }
  }
  return values.size() == count ? values : std::vector<double>(count, values.front());
}

void check_share(double share, const char* what) {
  if (!(share >= 0 && share <= 1)) {
    throw Error(ErrorKind::InvalidArgument, str(what, " is ", share, ", not between 0 and 1"));
  }
}

double max_of(const std::vector<double>& values) { return values.empty() ? 0 : *std::ranges::max_element(values); }

double mean_of(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// The messages of a rank that wait: those that came before the one that an action needs, as a peer's messages come in
// the order in which it sends them, and buffers.
class MessageMemory {
 public:
  MessageMemory(const Schedule& schedule, int rank, const Costs& costs)
      : schedule_(schedule), rank_(rank), costs_(costs), incoming_(schedule.rows.size()) {
    if (std::ranges::all_of(costs.values, [](double bytes) { return bytes == 0; })) return;
    for (int peer = 0; peer < schedule.num_ranks(); ++peer) {
      if (peer == rank) continue;
      std::size_t received = 0;
      for (const Action& action : schedule.rows[peer]) {
        for (const Action& part : {action.first_part(), action.second_part()}) {
          if (!part.is_compute()) continue;
          received += sender_to(part) == rank ? 1 : 0;
          add(peer, part, received);
        }
      }
      change_ += receive(peer, -1);
    }
  }

  // Returns how much more waits while this action runs than in the one before it. Call it for a row's actions in turn.
  double begin(const Action& action) {
    double change = std::exchange(change_, 0);
    const auto found = places_.find({action.kind == ActionKind::Forward, action.stage, action.microbatch});
    if (action.kind != ActionKind::BackwardWeight && found != places_.end()) {
      const auto [peer, index] = found->second;
      change += receive(peer, static_cast<int>(index));
      Message& message = incoming_[peer][index];
      if (std::exchange(message.waits, true)) change -= message.size;
      Sent& sent = sent_[peer];
      for (; sent.released < std::min(message.acknowledged, sent.sizes.size()); ++sent.released)
        change -= sent.sizes[sent.released];
    }
    // A message of its own is kept until the peer says that it came.
    const auto [to, boundary] = receiver_of(action);
    if (to >= 0 && to != rank_) {
      change_ = costs_.buffers[boundary] > 0 ? costs_.values[boundary] : 0;
      sent_[to].sizes.push_back(change_);
    }
    return change;
  }

 private:
  struct Message {
    double size = 0;
    bool posted = false;           // it has a buffer before it comes
    std::size_t acknowledged = 0;  // so many messages of this rank had come to the peer
    bool waits = false;            // counted
  };
  struct Sent {
    std::vector<double> sizes;
    std::size_t released = 0;
  };

  // Returns the rank that gets what an action makes for another stage, and the earlier of the two stages; -1: nobody.
  std::pair<int, int> receiver_of(const Action& action) const {
    const bool forward = action.kind == ActionKind::Forward;
    const int to = action.stage + (forward ? 1 : -1);
    if (action.kind == ActionKind::BackwardWeight || to < 0 || to >= schedule_.num_stages()) return {-1, 0};
    return {schedule_.placement.rank_of(to, action.microbatch), std::min(to, action.stage)};
  }
  // Returns the rank that an action has its message from; -1: none.
  int sender_to(const Action& action) const {
    const int from = action.stage + (action.kind == ActionKind::Forward ? -1 : 1);
    if (action.kind == ActionKind::BackwardWeight || from < 0 || from >= schedule_.num_stages()) return -1;
    return schedule_.placement.rank_of(from, action.microbatch);
  }
  void add(int peer, const Action& action, std::size_t received) {
    const auto [to, boundary] = receiver_of(action);
    if (to != rank_) return;
    const bool forward = action.kind == ActionKind::Forward, posted = costs_.buffers[boundary] > 0;
    places_[{forward, action.stage + (forward ? 1 : -1), action.microbatch}] = {peer, incoming_[peer].size()};
    incoming_[peer].push_back({posted ? costs_.buffers[boundary] : costs_.values[boundary], posted, received});
  }
  // With message `last` those before it are here, and two that are posted wait for the next ones.
  double receive(int peer, int last) {
    double change = 0;
    auto& messages = incoming_[peer];
    for (int i = 0; i <= last + 2 && i < static_cast<int>(messages.size()); ++i) {
      if (!messages[i].posted && i >= last) continue;
      if (!std::exchange(messages[i].waits, true)) change += messages[i].size;
    }
    return change;
  }

  const Schedule& schedule_;
  const int rank_;
  const Costs& costs_;
  std::vector<std::vector<Message>> incoming_;                                // by peer, in the order in which it sends
  std::map<std::tuple<bool, int, int>, std::pair<int, std::size_t>> places_;  // messages by the action that takes them
  std::map<int, Sent> sent_;                                                  // by peer
  double change_ = 0;                                                         // for the next action
};

}  // namespace

namespace schedule_internal {

bool has_backward(const Schedule& schedule) {
  return std::ranges::any_of(schedule.rows, [](const auto& row) {
    return std::ranges::any_of(
        row, [](const Action& action) { return action.is_compute() && action.kind != ActionKind::Forward; });
  });
}

std::vector<std::vector<Action>> without_pairs(const std::vector<std::vector<Action>>& rows) {
  std::vector<std::vector<Action>> parts;
  for (const auto& row : rows) {
    parts.emplace_back();
    for (const Action& action : row) {
      for (const Action& part : {action.first_part(), action.second_part()}) {
        if (!part.is_idle()) parts.back().push_back(part);
      }
    }
  }
  return parts;
}

std::pair<double, int> peak_memory(const Schedule& schedule, int rank, const Costs& given) {
  const std::vector<Action>& row = schedule.rows[rank];
  const RankCosts costs(given, schedule.placement.ranks);
  MessageMemory messages(schedule, rank, given);
  RankMemory memory(costs);
  int where = -1;
  for (std::size_t i = 0; i < row.size(); ++i) {
    for (const Action& part : {row[i].first_part(), row[i].second_part()}) {
      if (!part.is_compute()) continue;
      memory.hold(messages.begin(part));
      if (memory.run(part.kind, part.stage)) where = static_cast<int>(i);
    }
  }
  return {memory.peak(), where};
}

}  // namespace schedule_internal

Costs Costs::for_stages(int num_stages, int num_ranks) const {
  Costs result = *this;
  result.forward = spread(forward, num_stages, "forward");
  result.input = spread(input, num_stages, "input backward");
  result.weight = spread(weight, num_stages, "weight backward");
  result.communication = spread(communication, num_stages, "communication");
  result.copies = spread(copies, num_stages, "copies");
  if (full.empty()) {
    result.full.resize(result.input.size());
    std::transform(result.input.begin(), result.input.end(), result.weight.begin(), result.full.begin(), std::plus<>());
  } else {
    result.full = spread(full, num_stages, "full backward");
  }
  double share = static_cast<double>(num_ranks) / std::max(num_stages, 1);
  result.activation = spread(activation.empty() ? std::vector<double>{share} : activation, num_stages, "activation");
  check_share(overlap, "the overlap of forward and backward");
  result.held_for_weight = spread(held_for_weight, num_stages, "held for weight");
  result.gradient = spread(gradient.empty() ? std::vector<double>{0} : gradient, num_stages, "gradient");
  result.values = spread(values.empty() ? std::vector<double>{0} : values, num_stages, "values");
  result.buffers = spread(buffers.empty() ? std::vector<double>{0} : buffers, num_stages, "buffers");
  for (const auto list : schedule_internal::kWorking)
    result.working.*list = spread(result.working.*list, num_stages, "working memory");
  return result;
}

double Simulation::bubble_rate() const { return makespan > 0 ? 1 - mean_of(busy) / makespan : 0; }

double Simulation::cost() const {
  double longest = 0;
  for (std::size_t rank = 0; rank < first.size(); ++rank) longest = std::max(longest, last[rank] - first[rank]);
  return longest;
}

double Simulation::zero_bubble_rate() const {
  const double cost = this->cost();
  return cost > 0 ? 1 - mean_of(busy) / cost : 0;
}

double Simulation::bubble_time() const { return makespan - max_of(busy); }

double Simulation::zero_bubble_time() const { return cost() - max_of(busy); }

double Simulation::max_peak_memory() const { return max_of(peak_memory); }

Simulation simulate_schedule(const Schedule& schedule, const Costs& given, const StageEdges& edges) {
  CheckOptions check;
  check.forward_only = !schedule_internal::has_backward(schedule);
  check.blocking_receives = false;
  require_runnable(schedule, edges, check);
  Costs costs = given.for_stages(schedule.num_stages(), schedule.num_ranks());
  schedule_internal::StageGraph graph(edges, schedule.num_stages());
  const schedule_internal::RankCosts placed(costs, schedule.placement.ranks);
  schedule_internal::EventSimulation events(schedule, graph, placed, {.pairs_at_once = false});
  Simulation result;
  result.spans = std::move(events.spans);
  result.busy = std::move(events.busy);
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    double first = 0, last = 0;
    bool seen = false;
    for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      if (!schedule.rows[rank][i].is_compute()) continue;
      const Span& span = result.spans[rank][i];
      if (!seen) first = span.start;
      seen = true;
      last = span.end;
    }
    result.first.push_back(first);
    result.last.push_back(last);
    result.makespan = std::max(result.makespan, last);
    result.peak_memory.push_back(schedule_internal::peak_memory(schedule, static_cast<int>(rank), costs).first);
  }
  return result;
}

}  // namespace plumb
