#include "plumb/schedule/event_simulation.h"

#include <cmath>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/rank_memory.h"

namespace plumb::schedule_internal {

StageGraph::StageGraph(const StageEdges& given, int num_stages)
    : edges(given.empty() ? chain_edges(num_stages) : given),
      in(static_cast<std::size_t>(num_stages)),
      out(static_cast<std::size_t>(num_stages)) {
  auto fail = [](const StageEdge& edge, const char* why) {
    throw Error(ErrorKind::InvalidArgument, str("the stage edge ", edge.from, " -> ", edge.to, " ", why));
  };
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const StageEdge& edge = edges[i];
    if (edge.from < 0 || edge.to >= num_stages) fail(edge, "names a stage that is not there");
    if (edge.from >= edge.to) fail(edge, "does not lead to a later stage");
    if (find(edge.from, edge.to) >= 0) fail(edge, "is given twice");
    in[edge.to].push_back(static_cast<int>(i));
    out[edge.from].push_back(static_cast<int>(i));
  }
  for (auto& list : out) {
    std::ranges::sort(list, [this](int a, int b) { return edges[a].to < edges[b].to; });
  }
}

int StageGraph::find(int from, int to) const {
  if (from < 0 || from >= static_cast<int>(out.size())) return -1;
  for (int edge : out[from]) {
    if (edges[edge].to == to) return edge;
  }
  return -1;
}

int rank_of(const Event& event, const StageGraph& graph, const Placement& placement) {
  if (event.kind <= EventKind::Weight) return placement.rank_of(event.index, event.microbatch);
  const StageEdge& edge = graph.edges[event.index];
  bool at_from = event.kind == EventKind::SentForward || event.kind == EventKind::PostedBackward;
  return placement.rank_of(at_from ? edge.from : edge.to, event.microbatch);
}

std::pair<int, int> ends_of(const Action& message) {
  bool up = message.kind == ActionKind::SendForward || message.kind == ActionKind::RecvBackward;
  return up ? std::pair(message.stage, message.other_stage) : std::pair(message.other_stage, message.stage);
}

Event event_of(const Action& message, const StageGraph& graph) {
  const auto [from, to] = ends_of(message);
  const EventKind kind = message.kind == ActionKind::SendForward    ? EventKind::SentForward
                         : message.kind == ActionKind::SendBackward ? EventKind::SentBackward
                         : message.kind == ActionKind::RecvForward  ? EventKind::PostedForward
                                                                    : EventKind::PostedBackward;
  return {kind, graph.find(from, to), message.microbatch};
}

namespace {

constexpr double kNever = -1;  // times are not negative

class EventSimulator {
 public:
  EventSimulator(const Schedule& schedule, const StageGraph& graph, const Costs& costs, EventSimulationOptions options,
                 EventSimulation& result)
      : schedule_(schedule),
        graph_(graph),
        costs_(costs),
        options_(options),
        result_(result),
        messages_(schedule.has_messages()),
        times_(graph, schedule.num_microbatches, messages_, kNever) {
    result.positions.assign(schedule.rows.size(), 0);
    result.missing.assign(schedule.rows.size(), Event{});
    result.busy.assign(schedule.rows.size(), 0);
    clock_.assign(schedule.rows.size(), 0);
    waiting_.resize(schedule.rows.size() + 1);
    if (options.keep_spans) {
      result.spans.resize(schedule.rows.size());
      for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank)
        result.spans[rank].resize(schedule.rows[rank].size());
    }
  }

  void run() {
    std::vector<int> ready;
    for (int rank = schedule_.num_ranks() - 1; rank >= 0; --rank) ready.push_back(rank);
    while (!ready.empty()) {
      int rank = ready.back();
      ready.pop_back();
      advance(rank, ready);
    }
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      if (result_.positions[rank] < schedule_.rows[rank].size()) result_.stuck_ranks.push_back(rank);
    }
  }

 private:
  // Moves `start` to when the event's outcome is there; false if it has not happened.
  bool wait_for(int rank, const Event& event, double delay, double& start) {
    double time = times_[event];
    if (time == kNever) {
      result_.missing[rank] = event;
      return false;
    }
    start = std::max(start, time + delay);
    return true;
  }

  bool wait_for_edge(int rank, int edge, int microbatch, bool forward, double& start) {
    const StageEdge& e = graph_.edges[edge];
    int producer = forward ? e.from : e.to;
    bool crosses = schedule_.placement.rank_of(producer, microbatch) != rank;
    double delay = crosses ? costs_.communication[e.from] : 0;
    if (crosses && messages_) {
      return wait_for(rank, {forward ? EventKind::SentForward : EventKind::SentBackward, edge, microbatch}, delay,
                      start);
    }
    return wait_for(rank, {forward ? EventKind::Forward : EventKind::Gradient, producer, microbatch}, delay, start);
  }

  bool inputs_there(int rank, const Action& action, double& start) {
    if (action.kind == ActionKind::Forward) {
      for (int edge : graph_.in[action.stage]) {
        if (!wait_for_edge(rank, edge, action.microbatch, true, start)) return false;
      }
    } else if (action.kind == ActionKind::BackwardWeight) {
      return wait_for(rank, {EventKind::Gradient, action.stage, action.microbatch}, 0, start);
    } else if (action.kind == ActionKind::BackwardInput || action.kind == ActionKind::FullBackward) {
      if (!wait_for(rank, {EventKind::Forward, action.stage, action.microbatch}, 0, start)) return false;
      for (int edge : graph_.out[action.stage]) {
        if (graph_.edges[edge].gradient && !wait_for_edge(rank, edge, action.microbatch, false, start)) return false;
      }
    }
    return true;
  }

  double duration(const Action& action) const {
    if (action.kind != ActionKind::Overlap)
      return action.is_compute() ? length_of(costs_, action.kind, action.stage) : 0;
    double first = duration(action.first_part()), second = duration(action.second_part());
    return first + second - costs_.overlap * std::min(first, second);
  }

  void happened(int rank, const Action& action, double end) {
    if (!action.is_compute()) return;
    const auto fires = [&](EventKind kind) { fire(rank, {kind, action.stage, action.microbatch}, end); };
    if (action.kind == ActionKind::Forward) return fires(EventKind::Forward);
    if (action.kind != ActionKind::BackwardWeight) fires(EventKind::Gradient);
    if (action.kind != ActionKind::BackwardInput) fires(EventKind::Weight);
  }

  void fire(int rank, const Event& event, double time) {
    times_[event] = time;
    std::erase_if(waiting_[rank], [&](int other) {
      const bool met = result_.missing[other] == event;
      if (met) ready_->push_back(other);
      return met;
    });
  }

  // Messages: whether the rank may go on past one.
  bool pass_message(int rank, const Action& action, double& start) {
    const Event event = event_of(action, graph_);
    bool forward = action.kind == ActionKind::SendForward || action.kind == ActionKind::RecvForward;
    const Event sent{forward ? EventKind::SentForward : EventKind::SentBackward, event.index, event.microbatch};
    const Event posted{forward ? EventKind::PostedForward : EventKind::PostedBackward, event.index, event.microbatch};
    if (action.is_send()) {
      const Event made{forward ? EventKind::Forward : EventKind::Gradient, action.stage, action.microbatch};
      if (!wait_for(rank, made, 0, start)) return false;
      if (options_.blocking_sends && !wait_for(rank, posted, 0, start)) return false;
      fire(rank, sent, start);
      return true;
    }
    if (options_.blocking_sends && times_[posted] == kNever) fire(rank, posted, start);
    return !options_.blocking_receives ||
           wait_for(rank, sent, costs_.communication[graph_.edges[event.index].from], start);
  }

  void advance(int rank, std::vector<int>& ready) {
    ready_ = &ready;
    const auto& row = schedule_.rows[rank];
    std::size_t& position = result_.positions[rank];
    for (; position < row.size(); ++position) {
      const Action& action = row[position];
      double start = clock_[rank];
      double end = start;
      bool goes = action.is_message()                                             ? pass_message(rank, action, end)
                  : action.kind == ActionKind::Overlap && !options_.pairs_at_once ? run_pair(rank, action, start, end)
                                                                                  : run_whole(rank, action, start, end);
      if (!goes) {
        int owner = rank_of(result_.missing[rank], graph_, schedule_.placement);
        // Nobody will make it happen: keep the rank where it is counted as stuck.
        waiting_[owner >= 0 && owner < schedule_.num_ranks() ? owner : schedule_.num_ranks()].push_back(rank);
        return;
      }
      if (action.is_message()) start = end;
      if (options_.keep_spans) result_.spans[rank][position] = {start, end};
      if (action.is_compute() || (action.is_message() && options_.blocking_receives)) clock_[rank] = end;
    }
  }

  // An action, or a pair taken as one: all it needs before it starts, all it makes when it ends.
  bool run_whole(int rank, const Action& action, double& start, double& end) {
    if (!inputs_there(rank, action.first_part(), start) || !inputs_there(rank, action.second_part(), start))
      return false;
    end = start + duration(action);
    result_.busy[rank] += end - start;
    happened(rank, action.first_part(), end);
    happened(rank, action.second_part(), end);
    return true;
  }

  // A pair as two: the backward may start when its own input is there, and what may be hidden behind the forward is
  // left of it. A rank can stop between the two.
  bool run_pair(int rank, const Action& action, double& start, double& end) {
    double first = duration(action.first_part()), second = duration(action.second_part());
    if (half_done_.empty()) half_done_.assign(schedule_.rows.size(), kNever);
    if (half_done_[rank] == kNever) {
      if (!inputs_there(rank, action.first_part(), start)) return false;
      half_done_[rank] = start;
      happened(rank, action.first_part(), start + first);
    }
    start = half_done_[rank];
    double free = start + first, resume = free - costs_.overlap * std::min(first, second);
    if (!inputs_there(rank, action.second_part(), resume)) return false;
    end = std::max(free, resume + second);
    result_.busy[rank] += first + second - std::max(0.0, free - resume);
    happened(rank, action.second_part(), resume + second);
    half_done_[rank] = kNever;
    return true;
  }

  const Schedule& schedule_;
  const StageGraph& graph_;
  const Costs& costs_;
  EventSimulationOptions options_;
  EventSimulation& result_;
  bool messages_;
  EventTable<double> times_;
  std::vector<double> clock_;              // by rank: when it is free
  std::vector<double> half_done_;          // by rank: start of a pair whose forward has run
  std::vector<std::vector<int>> waiting_;  // by rank: the ranks that wait for it
  std::vector<int>* ready_ = nullptr;
};

}  // namespace

EventSimulation::EventSimulation(const Schedule& schedule, const StageGraph& graph, const Costs& costs,
                                 EventSimulationOptions options) {
  EventSimulator(schedule, graph, costs, options, *this).run();
}

Action other_end(const Action& message) {
  const auto kind = message.kind == ActionKind::SendForward    ? ActionKind::RecvForward
                    : message.kind == ActionKind::RecvForward  ? ActionKind::SendForward
                    : message.kind == ActionKind::SendBackward ? ActionKind::RecvBackward
                                                               : ActionKind::SendBackward;
  return Action::message(kind, message.other_stage, message.microbatch, message.stage);
}

}  // namespace plumb::schedule_internal

namespace plumb {

Schedule with_idle_ticks(const Schedule& given) {
  Schedule schedule = without_idle(given);
  require_runnable(schedule);
  for (const auto& row : schedule.rows) {
    for (const Action& action : row) {
      if (action.kind == ActionKind::Overlap) return schedule;
    }
  }
  Costs costs = Costs{.full = {1}, .overlap = 1}.for_stages(schedule.num_stages(), schedule.num_ranks());
  schedule_internal::StageGraph graph({}, schedule.num_stages());
  schedule_internal::EventSimulation events(schedule, graph, costs);
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    std::vector<Action> row;
    for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const auto tick = static_cast<std::size_t>(std::lround(events.spans[rank][i].start));
      if (row.size() < tick) row.resize(tick, Action::idle());
      row.push_back(schedule.rows[rank][i]);
    }
    schedule.rows[rank] = std::move(row);
  }
  return schedule;
}

}  // namespace plumb
