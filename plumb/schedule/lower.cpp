#include "plumb/schedule/lower.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/event_simulation.h"

namespace plumb {
namespace {

using schedule_internal::EventSimulation;
using schedule_internal::other_end;
using schedule_internal::StageGraph;

// A message and where its ends go: into the rows of both ranks at one instant.
struct Message {
  double time;
  std::int32_t from_rank, to_rank;
  std::int32_t from_position;  // row index of the action that makes the value
  std::int32_t edge, microbatch;
  bool backward;

  // The order all ranks agree on.
  auto key() const { return std::tie(time, from_rank, from_position, backward, edge, microbatch); }
};

std::vector<Message> find_messages(const Schedule& schedule, const StageGraph& graph, const EventSimulation& events) {
  std::vector<Message> messages;
  const Placement& placement = schedule.placement;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const Action& action = schedule.rows[rank][i];
      auto add = [&](int edge, int other, int microbatch, bool backward) {
        int peer = placement.rank_of(other, microbatch);
        if (peer == rank) return;
        messages.push_back(
            {events.spans[rank][i].end, rank, peer, static_cast<std::int32_t>(i), edge, microbatch, backward});
      };
      for (const Action& part : {action.first_part(), action.second_part()}) {
        if (part.kind == ActionKind::Forward) {
          for (int edge : graph.out[part.stage]) add(edge, graph.edges[edge].to, part.microbatch, false);
        } else if (part.kind == ActionKind::BackwardInput || part.kind == ActionKind::FullBackward) {
          for (int edge : graph.in[part.stage]) {
            if (graph.edges[edge].gradient) add(edge, graph.edges[edge].from, part.microbatch, true);
          }
        }
      }
    }
  }
  std::ranges::sort(messages, [](const Message& a, const Message& b) { return a.key() < b.key(); });
  return messages;
}

bool makes_weight_gradient(const Action& action) {
  return action.kind == ActionKind::BackwardWeight || action.kind == ActionKind::FullBackward;
}

void split_pairs(Schedule& schedule) {
  for (auto& row : schedule.rows) {
    std::vector<Action> parts;
    parts.reserve(row.size());
    for (const Action& action : row) {
      parts.push_back(action.first_part());
      if (action.kind == ActionKind::Overlap) parts.push_back(action.second_part());
    }
    row = std::move(parts);
  }
}

// Actions around the computing of one rank: UNSHARD and RESHARD before an action, REDUCE_GRAD after it.
class Surroundings {
 public:
  Surroundings(const std::vector<Action>& row, const LowerOptions& options) : row_(row), options_(options) {
    for (const Action& action : row) {
      for (const Action& part : {action.first_part(), action.second_part()}) {
        if (part.is_compute()) held_.insert(part.stage);
        if (makes_weight_gradient(part)) ++weights_left_[part.stage];
      }
    }
  }

  void before(std::size_t i, std::vector<Action>& out) {
    if (options_.max_unsharded < 1) return;
    std::vector<int> wanted = next_stages(i);
    std::erase_if(whole_, [&](int stage) {
      bool keep = std::ranges::find(wanted, stage) != wanted.end();
      if (!keep) out.push_back(Action::of_stage(ActionKind::Reshard, stage));
      return !keep;
    });
    for (int stage : wanted) {
      if (std::ranges::find(whole_, stage) != whole_.end()) continue;
      whole_.push_back(stage);
      out.push_back(Action::of_stage(ActionKind::Unshard, stage));
    }
  }

  void after(const Action& action, std::vector<Action>& out) {
    if (!options_.reduce_grad) return;
    for (const Action& part : {action.first_part(), action.second_part()}) {
      if (makes_weight_gradient(part) && --weights_left_[part.stage] == 0) {
        out.push_back(Action::of_stage(ActionKind::ReduceGrad, part.stage));
      }
    }
  }

  void finish(std::vector<Action>& out) const {
    for (int stage : whole_) out.push_back(Action::of_stage(ActionKind::Reshard, stage));
  }

 private:
  // Returns the stages used next, soonest first; both of an overlapped pair even if that is one more than allowed.
  std::vector<int> next_stages(std::size_t i) const {
    std::vector<int> stages;
    for (; i < row_.size() && static_cast<int>(stages.size()) < options_.max_unsharded; ++i) {
      for (const Action& part : {row_[i].first_part(), row_[i].second_part()}) {
        if (part.is_compute() && std::ranges::find(stages, part.stage) == stages.end()) {
          stages.push_back(part.stage);
        }
      }
      // A rank holds few stages: past a while nothing new comes.
      if (stages.size() == held_.size()) break;
    }
    return stages;
  }

  const std::vector<Action>& row_;
  const LowerOptions& options_;
  std::set<int> held_;               // stages
  std::map<int, int> weights_left_;  // number of weight gradients to come, by stage
  std::vector<int> whole_;
};

// Returns the row with the actions around its entries. `before` adds those before entry i; row.size(): after the last.
std::vector<Action> surround(const std::vector<Action>& row, const LowerOptions& options,
                             const std::function<void(std::size_t i, std::vector<Action>& out)>& before) {
  std::vector<Action> out;
  Surroundings surroundings(row, options);
  for (std::size_t i = 0; i < row.size(); ++i) {
    before(i, out);
    surroundings.before(i, out);
    out.push_back(row[i]);
    surroundings.after(row[i], out);
  }
  before(row.size(), out);
  surroundings.finish(out);
  return out;
}

}  // namespace

Schedule lower_schedule(const Schedule& given, const StageEdges& edges, const LowerOptions& options) {
  if (given.has_messages()) {
    throw Error(ErrorKind::Schedule, "the schedule " + given.name + " has sends or receives already", "",
                "lower the table that only computes, or run this one as it is");
  }
  CheckOptions check;
  check.forward_only = !schedule_internal::has_backward(given);
  require_runnable(given, edges, check);
  Schedule schedule = without_idle(given);
  if (!options.keep_pairs) split_pairs(schedule);
  StageGraph graph(edges, schedule.num_stages());
  EventSimulation events(schedule, graph, Costs{}.for_stages(schedule.num_stages(), schedule.num_ranks()));

  std::vector<Message> messages = find_messages(schedule, graph, events);
  std::vector<std::vector<std::size_t>> of_rank(schedule.rows.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    of_rank[messages[i].from_rank].push_back(i);
    of_rank[messages[i].to_rank].push_back(i);
  }
  Schedule lowered = schedule;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto& row = schedule.rows[rank];
    std::size_t next = 0;
    lowered.rows[rank] = surround(row, options, [&](std::size_t entry, std::vector<Action>& out) {
      const double until =
          entry < row.size() ? events.spans[rank][entry].start : std::numeric_limits<double>::infinity();
      for (; next < of_rank[rank].size() && messages[of_rank[rank][next]].time <= until; ++next) {
        const Message& message = messages[of_rank[rank][next]];
        const StageEdge& edge = graph.edges[message.edge];
        bool sends = message.from_rank == rank;
        int here = sends != message.backward ? edge.from : edge.to, there = edge.from + edge.to - here;
        ActionKind kind = message.backward ? (sends ? ActionKind::SendBackward : ActionKind::RecvBackward)
                                           : (sends ? ActionKind::SendForward : ActionKind::RecvForward);
        out.push_back(Action::message(kind, here, message.microbatch, there));
      }
    });
  }
  return lowered;
}

std::vector<std::vector<int>> meeting_messages(const Schedule& lowered) {
  std::vector<std::vector<int>> meets;
  for (const auto& row : lowered.rows) meets.emplace_back(row.size(), -1);
  auto peer_of = [&](const Action& message) {
    return lowered.placement.rank_of(message.other_stage, message.microbatch);
  };
  for (int rank = 0; rank < lowered.num_ranks(); ++rank) {
    const auto& row = lowered.rows[rank];
    for (std::size_t i = 0; i + 1 < row.size(); ++i) {
      const Action &first = row[i], &second = row[i + 1];
      if (!first.is_message() || !second.is_message() || first.is_send() == second.is_send()) continue;
      const int peer = peer_of(first);
      if (peer_of(second) != peer || meets[rank][i] >= 0) continue;
      const auto& theirs = lowered.rows[peer];
      const auto at = std::ranges::find(theirs, other_end(first)) - theirs.begin();
      const auto end = static_cast<std::ptrdiff_t>(theirs.size());
      // Rows follow one order in time: the second is behind the first there, too.
      if (at + 1 >= end || theirs[at + 1] != other_end(second) || meets[peer][at] >= 0 || meets[peer][at + 1] >= 0)
        continue;
      meets[rank][i] = static_cast<int>(i) + 1;
      meets[rank][i + 1] = static_cast<int>(i);
      meets[peer][at] = static_cast<int>(at) + 1;
      meets[peer][at + 1] = static_cast<int>(at);
    }
  }
  return meets;
}

std::vector<Action> with_surroundings(const std::vector<Action>& given, const LowerOptions& options) {
  std::vector<Action> row = given;
  std::erase_if(row, [](const Action& action) { return action.is_idle(); });
  return surround(row, options, [](std::size_t, std::vector<Action>&) {});
}

Schedule forward_only(Schedule schedule) {
  for (auto& row : schedule.rows) {
    std::erase_if(row, [](const Action& a) { return a.is_compute() && a.first_part().kind != ActionKind::Forward; });
    for (Action& action : row) action = action.first_part();
  }
  return schedule;
}

}  // namespace plumb
