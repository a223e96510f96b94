#include "plumb/schedule/check.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/schedule/event_simulation.h"
#include "plumb/schedule/rank_memory.h"

namespace plumb {
namespace {

using namespace schedule_internal;

constexpr int kAbsent = -1;

class Checker {
 public:
  Checker(const Schedule& schedule, const StageEdges& edges, const CheckOptions& options)
      : schedule_(schedule), options_(options), graph_(edges, schedule.num_stages()) {}

  CheckReport run() {
    if (!shape_fits()) return std::move(report_);
    place_actions();
    if (report_.ok()) check_complete();
    if (report_.ok()) check_order();
    if (report_.ok() && messages_) check_messages();
    if (report_.ok() && messages_ && options_.in_order) check_message_order();
    if (report_.ok()) check_progress();
    if (report_.ok()) check_memory();
    return std::move(report_);
  }

 private:
  void add(ProblemKind kind, int rank, int position, const Action& action, std::string message) {
    if (report_.num_problems++ < options_.max_problems) {
      report_.problems.push_back({kind, rank, position, action, std::move(message)});
    }
  }

  // Returns an action of the table, as "1F2 (rank 0, position 5)".
  std::string named(int rank, int position) const {
    return str(to_string(schedule_.rows[rank][position]), " (rank ", rank, ", position ", position, ")");
  }

  // Adds a problem about an action of the table, whose name begins the sentence.
  template <class... Parts>
  void blame(ProblemKind kind, int rank, int position, const Parts&... why) {
    add(kind, rank, position, schedule_.rows[rank][position], str(named(rank, position), " ", why...));
  }

  // Returns the position of an event in its rank's row.
  int& position(EventKind kind, int index, int microbatch) { return (*positions_)[{kind, index, microbatch}]; }

  bool shape_fits() {
    auto fail = [this](std::string message) { add(ProblemKind::Shape, -1, -1, {}, std::move(message)); };
    const Placement& placement = schedule_.placement;
    int stages = schedule_.num_stages(), ranks = schedule_.num_ranks(), microbatches = schedule_.num_microbatches;
    if (ranks < 1 || stages < 1 || microbatches < 1) {
      fail(str("the schedule has ", ranks, " ranks, ", stages, " stages and ", microbatches,
               " microbatches; it needs at least one of each"));
      return false;
    }
    if (!placement.reverse_ranks.empty() && placement.reverse_ranks.size() != placement.ranks.size()) {
      fail(str("the placement gives ranks for ", stages, " stages one way and for ", placement.reverse_ranks.size(),
               " the other way"));
      return false;
    }
    for (const auto* list : {&placement.ranks, &placement.reverse_ranks}) {
      for (std::size_t stage = 0; stage < list->size(); ++stage) {
        int rank = (*list)[stage];
        if (rank < 0 && list == &placement.ranks)
          fail(str("stage ", stage, " is on no rank"));
        else if (rank < 0 || rank >= ranks) {
          fail(str("stage ", stage, " is placed on rank ", rank, ", but the table has ", ranks, " rows"));
        }
      }
    }
    // Every pair of stage and microbatch needs a forward, and only then are tables by pair of a bearable size.
    std::size_t computing = 0;
    for (const auto& row : schedule_.rows) {
      for (const Action& action : row) {
        computing += action.kind == ActionKind::Forward || action.kind == ActionKind::Overlap;
        messages_ |= action.is_message();
      }
    }
    if (computing / static_cast<std::size_t>(stages) + 1 < static_cast<std::size_t>(microbatches)) {
      fail(str("the table has ", computing, " forwards, too few for ", stages, " stages and ", microbatches,
               " microbatches"));
    }
    return report_.ok();
  }

  void place_actions() {
    positions_.emplace(graph_, schedule_.num_microbatches, messages_, kAbsent);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& row = schedule_.rows[rank];
      for (int i = 0; i < static_cast<int>(row.size()); ++i) {
        for (const Action& part : {row[i].first_part(), row[i].second_part()}) {
          if (!part.is_idle()) place(rank, i, part);
        }
      }
    }
  }

  void place(int rank, int i, const Action& part) {
    const int stage = part.stage, m = part.microbatch;
    if (stage < 0 || stage >= schedule_.num_stages()) {
      return blame(ProblemKind::Shape, rank, i, "names stage ", stage, ", but the schedule has ",
                   schedule_.num_stages(), " stages");
    }
    if (part.is_message()) return place_message(rank, i, part);
    if (part.is_compute() && (m < 0 || m >= schedule_.num_microbatches)) {
      return blame(ProblemKind::Shape, rank, i, "names microbatch ", m, ", but the schedule has ",
                   schedule_.num_microbatches);
    }
    if (!on_right_rank(rank, i, part) || !part.is_compute()) return;
    if (part.kind == ActionKind::Forward) return take(position(EventKind::Forward, stage, m), rank, i);
    if (options_.forward_only) {
      return blame(ProblemKind::Duplicate, rank, i, "is a backward in a schedule without any");
    }
    if (part.kind != ActionKind::BackwardWeight) take(position(EventKind::Gradient, stage, m), rank, i);
    if (part.kind != ActionKind::BackwardInput) take(position(EventKind::Weight, stage, m), rank, i);
  }

  void take(int& slot, int rank, int i) {
    if (slot == kAbsent) {
      slot = i;
      return;
    }
    if (!report_.problems.empty() && report_.problems.back().rank == rank && report_.problems.back().position == i)
      return;
    const Action& before = schedule_.rows[rank][slot];
    const Action& now = schedule_.rows[rank][i];
    bool same = before.kind == now.kind || before.kind == ActionKind::Overlap || now.kind == ActionKind::Overlap;
    blame(ProblemKind::Duplicate, rank, i, same ? "repeats " : "does again what ", named(rank, slot),
          same ? "" : " does: a backward is either B or I and W");
  }

  bool on_right_rank(int rank, int i, const Action& part) {
    const Placement& placement = schedule_.placement;
    bool any = part.microbatch < 0 && !placement.reverse_ranks.empty() && placement.reverse_ranks[part.stage] == rank;
    int right = placement.rank_of(part.stage, part.microbatch);
    if (right == rank || any) return true;
    blame(ProblemKind::Placement, rank, i, "stands on rank ", rank, ", but stage ", part.stage, " is placed on rank ",
          right, placement_hint());
    return false;
  }

  // Returns the placement that the table itself shows, if that is the other of the two common placements.
  std::string placement_hint() const {
    int ranks = schedule_.num_ranks(), stages = schedule_.num_stages();
    if (stages % ranks != 0) return "";
    Placement shown = infer_placement(schedule_.rows);
    Placement loop = loop_placement(ranks, stages / ranks), v = v_placement(ranks, stages / ranks);
    if (loop == v) return "";
    if (shown == v && schedule_.placement == loop) return " (the table is a V schedule, the placement a loop)";
    if (shown == loop && schedule_.placement == v) return " (the table is looped, the placement a V)";
    return "";
  }

  void place_message(int rank, int i, const Action& message) {
    const int m = message.microbatch;
    if (m < 0 || m >= schedule_.num_microbatches) {
      return blame(ProblemKind::Message, rank, i, "names a microbatch that the schedule does not have");
    }
    const auto [from, to] = ends_of(message);
    const Event event = event_of(message, graph_);
    bool backward = event.kind == EventKind::SentBackward || event.kind == EventKind::PostedBackward;
    if (event.index < 0 || (backward && !graph_.edges[event.index].gradient)) {
      return blame(ProblemKind::Message, rank, i, "moves a ", backward ? "gradient" : "value", " between stages ", from,
                   " and ", to, " where there is none");
    }
    if (!on_right_rank(rank, i, message)) return;
    if (schedule_.placement.rank_of(from, m) == schedule_.placement.rank_of(to, m)) {
      return blame(ProblemKind::Message, rank, i,
                   "moves a value between two stages of one rank, which needs no message");
    }
    take((*positions_)[event], rank, i);
  }

  void check_complete() {
    auto missing = [this](const Action& action) {
      int rank = schedule_.placement.rank_of(action.stage, action.microbatch);
      add(ProblemKind::Missing, rank, -1, action, str(to_string(action), " is missing on rank ", rank));
    };
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int m = 0; m < schedule_.num_microbatches; ++m) {
        if (position(EventKind::Forward, stage, m) == kAbsent) missing(Action::forward(stage, m));
        if (options_.forward_only) continue;
        bool gradient = position(EventKind::Gradient, stage, m) != kAbsent;
        bool weight = position(EventKind::Weight, stage, m) != kAbsent;
        if (!gradient && !weight)
          missing(Action::backward(stage, m));
        else if (!gradient)
          missing(Action::input(stage, m));
        else if (!weight)
          missing(Action::weight(stage, m));
      }
    }
  }

  void before(int rank, int first, int second, const char* what) {
    if (first > second) {
      blame(ProblemKind::Order, rank, second, "comes before ", named(rank, first), ", ", what);
    }
  }

  void check_order() {
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int m = 0; m < schedule_.num_microbatches && !options_.forward_only; ++m) {
        int rank = schedule_.placement.rank_of(stage, m);
        int gradient = position(EventKind::Gradient, stage, m), weight = position(EventKind::Weight, stage, m);
        before(rank, position(EventKind::Forward, stage, m), gradient, "its forward");
        before(rank, gradient, weight, "its input backward");
        if (m > 0 && schedule_.placement.rank_of(stage, m - 1) == rank &&
            position(EventKind::Weight, stage, m - 1) > weight) {
          report_.weights_in_microbatch_order = false;
        }
      }
    }
    check_stage_actions();
  }

  // REDUCE_GRAD after the stage's last weight gradient; computing only between UNSHARD and RESHARD, if there are any.
  void check_stage_actions() {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& row = schedule_.rows[rank];
      auto has = [&row](ActionKind kind) {
        return std::ranges::any_of(row, [kind](const Action& action) { return action.kind == kind; });
      };
      bool sharded = has(ActionKind::Unshard) || has(ActionKind::Reshard);
      if (!sharded && !has(ActionKind::ReduceGrad)) continue;
      std::vector<int> reduced(schedule_.num_stages(), -1);
      std::vector<char> whole(reduced.size(), !sharded);
      for (int i = 0; i < static_cast<int>(row.size()); ++i) {
        const Action& action = row[i];
        if (action.kind == ActionKind::Unshard || action.kind == ActionKind::Reshard) {
          bool unshard = action.kind == ActionKind::Unshard;
          if (sharded && static_cast<bool>(whole[action.stage]) == unshard) {
            blame(ProblemKind::Order, rank, i, "finds the stage ", unshard ? "whole" : "sharded", " already");
          }
          whole[action.stage] = unshard;
        } else if (action.kind == ActionKind::ReduceGrad) {
          if (reduced[action.stage] >= 0) {
            blame(ProblemKind::Duplicate, rank, i, "repeats ", named(rank, reduced[action.stage]));
          }
          reduced[action.stage] = i;
        }
        for (const Action& part : {action.first_part(), action.second_part()}) {
          if (!part.is_compute()) continue;
          if (sharded && !whole[part.stage]) blame(ProblemKind::Order, rank, i, "runs while its stage is sharded");
          if (part.kind != ActionKind::Forward && part.kind != ActionKind::BackwardInput && reduced[part.stage] >= 0) {
            blame(ProblemKind::Order, rank, i, "makes a gradient after ", named(rank, reduced[part.stage]));
          }
        }
      }
    }
  }

  void check_messages() {
    for (int e = 0; e < static_cast<int>(graph_.edges.size()); ++e) {
      const StageEdge& edge = graph_.edges[e];
      for (int m = 0; m < schedule_.num_microbatches; ++m) {
        check_message(edge, e, m, false);
        if (edge.gradient && !options_.forward_only) check_message(edge, e, m, true);
      }
    }
  }

  // Both ends of a message are there, behind its value and before its use.
  void check_message(const StageEdge& edge, int e, int m, bool backward) {
    const int maker = backward ? edge.to : edge.from, user = backward ? edge.from : edge.to;
    const int from = schedule_.placement.rank_of(maker, m), to = schedule_.placement.rank_of(user, m);
    if (from == to) return;
    const int sent = position(backward ? EventKind::SentBackward : EventKind::SentForward, e, m);
    const int received = position(backward ? EventKind::PostedBackward : EventKind::PostedForward, e, m);
    if (sent == kAbsent || received == kAbsent) {
      const Action send =
          Action::message(backward ? ActionKind::SendBackward : ActionKind::SendForward, maker, m, user);
      const std::string sending = str(to_string(send), " on rank ", from);
      const std::string receiving = str(to_string(other_end(send)), " on rank ", to);
      if (sent != kAbsent) return blame(ProblemKind::Message, from, sent, "has no ", receiving);
      if (received != kAbsent) return blame(ProblemKind::Message, to, received, "has no ", sending);
      return add(ProblemKind::Missing, from, -1, send, sending + " and " + receiving + " are missing");
    }
    const EventKind computed = backward ? EventKind::Gradient : EventKind::Forward;
    before(from, position(computed, maker, m), sent, "which makes its value");
    before(to, received, position(computed, user, m),
           backward ? "which receives its gradient" : "which receives its input");
  }

  // The k-th send to a rank meets the k-th receive there. Every message has both ends by now.
  void check_message_order() {
    std::map<std::pair<int, int>, std::vector<int>> sends, receives;  // positions, by sender and receiver
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      for (std::size_t i = 0; i < schedule_.rows[rank].size(); ++i) {
        const Action& action = schedule_.rows[rank][i];
        if (!action.is_message()) continue;
        int peer = schedule_.placement.rank_of(action.other_stage, action.microbatch);
        (action.is_send() ? sends[{rank, peer}] : receives[{peer, rank}]).push_back(static_cast<int>(i));
      }
    }
    for (const auto& [pair, sent] : sends) {
      const auto& received = receives[pair];
      auto [from, to] = pair;
      for (std::size_t k = 0; k < sent.size(); ++k) {
        if (other_end(schedule_.rows[from][sent[k]]) == schedule_.rows[to][received[k]]) continue;
        blame(ProblemKind::Message, from, sent[k], "meets ", named(to, received[k]), ": each is number ", k + 1,
              " from rank ", from, " to rank ", to, ", and messages of two ranks match in order");
        break;  // those behind it are off as well
      }
    }
  }

  void check_progress() {
    Costs costs = Costs{}.for_stages(schedule_.num_stages(), schedule_.num_ranks());
    EventSimulation events(schedule_, graph_, costs,
                           {.blocking_receives = options_.blocking_receives || options_.blocking_sends,
                            .blocking_sends = options_.blocking_sends,
                            .keep_spans = false});
    if (events.finished()) return;
    // Every stuck rank waits for one that is stuck too: from any of them the way leads into a ring.
    std::vector<char> seen(schedule_.rows.size(), 0);
    int rank = events.stuck_ranks.front();
    while (!seen[rank]) {
      seen[rank] = 1;
      rank = rank_of(events.missing[rank], graph_, schedule_.placement);
    }
    std::string ring;
    int first = rank, length = 0;
    do {
      int stop = static_cast<int>(events.positions[rank]);
      const Event& missing = events.missing[rank];
      const int next = rank_of(missing, graph_, schedule_.placement);
      if (++length > 1) ring += "; ";
      if (length <= 8) {
        ring += str("rank ", rank, " stops at ", to_string(schedule_.rows[rank][stop]), " (position ", stop,
                    "), which waits for ", named(next, (*positions_)[missing]));
      }
      rank = next;
    } while (rank != first);
    if (length > 8) ring += str("... (", length, " ranks in the ring)");
    int stop = static_cast<int>(events.positions[first]);
    add(ProblemKind::Deadlock, first, stop, schedule_.rows[first][stop], "deadlock: " + ring);
  }

  void check_memory() {
    const RankCosts costs(options_.memory.for_stages(schedule_.num_stages(), schedule_.num_ranks()),
                          schedule_.placement.ranks);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      auto [peak, where] = peak_memory(schedule_, rank, costs);
      report_.peak_memory.push_back(peak);
      // Sums of shares like 1/3 may miss the limit by rounding.
      if (peak > options_.memory_limit * (1 + 1e-9)) {
        blame(ProblemKind::Memory, rank, where, "brings the memory held to ", peak, ", over the limit of ",
              options_.memory_limit);
      }
    }
  }

  const Schedule& schedule_;
  const CheckOptions& options_;
  StageGraph graph_;
  bool messages_ = false;
  std::optional<EventTable<int>> positions_;
  CheckReport report_;
};

}  // namespace

std::string CheckReport::text() const {
  if (ok()) return "ok";
  std::string text;
  for (const auto& problem : problems) text += (text.empty() ? "" : "\n") + problem.message;
  if (num_problems > problems.size()) text += str("\n... and ", num_problems - problems.size(), " more");
  return text;
}

CheckReport check_schedule(const Schedule& schedule, const StageEdges& edges, const CheckOptions& options) {
  return Checker(schedule, edges, options).run();
}

void require_runnable(const Schedule& schedule, const StageEdges& edges, const CheckOptions& options) {
  CheckReport report = check_schedule(schedule, edges, options);
  if (!report.ok()) {
    throw Error(ErrorKind::Schedule,
                "the schedule" + (schedule.name.empty() ? "" : " " + schedule.name) + " cannot run: " + report.text());
  }
}

}  // namespace plumb
