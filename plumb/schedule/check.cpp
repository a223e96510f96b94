#include "plumb/schedule/check.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/schedule/event_simulation.h"

namespace plumb {
namespace {

using schedule_internal::Event;
using schedule_internal::EventKind;
using schedule_internal::EventSimulation;
using schedule_internal::other_end;
using schedule_internal::StageGraph;

constexpr std::int32_t kAbsent = -1;

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
  // Slots of the position table: what an action (or half of one) does to its stage and microbatch, or edge.
  enum Slot { kForward, kGradient, kWeight, kStageSlots };
  enum MessageSlot { kSendForward, kRecvForward, kSendBackward, kRecvBackward, kMessageSlots };

  void add(ProblemKind kind, int rank, int position, const Action& action, std::string message) {
    if (report_.num_problems++ < options_.max_problems) {
      report_.problems.push_back({kind, rank, position, action, std::move(message)});
    }
  }

  static std::string at(int rank, std::int64_t position) {
    return "rank " + std::to_string(rank) + ", position " + std::to_string(position);
  }

  // An action of the table, as "1F2 (rank 0, position 5)".
  std::string named(int rank, int position) const {
    return to_string(schedule_.rows[rank][position]) + " (" + at(rank, position) + ")";
  }

  std::size_t cell(int slot, int index, int microbatch, std::size_t height) const {
    return (static_cast<std::size_t>(slot) * height + static_cast<std::size_t>(index)) *
               static_cast<std::size_t>(schedule_.num_microbatches) +
           static_cast<std::size_t>(microbatch);
  }
  std::int32_t& position(Slot slot, int stage, int microbatch) {
    return positions_[cell(slot, stage, microbatch, static_cast<std::size_t>(schedule_.num_stages()))];
  }
  std::int32_t& message_position(int slot, int edge, int microbatch) {
    return message_positions_[cell(slot, edge, microbatch, graph_.edges.size())];
  }

  bool shape_fits() {
    auto fail = [this](std::string message) { add(ProblemKind::Shape, -1, -1, {}, std::move(message)); };
    const Placement& placement = schedule_.placement;
    int stages = schedule_.num_stages(), ranks = schedule_.num_ranks(), microbatches = schedule_.num_microbatches;
    if (ranks < 1 || stages < 1 || microbatches < 1) {
      fail("the schedule has " + std::to_string(ranks) + " ranks, " + std::to_string(stages) + " stages and " +
           std::to_string(microbatches) + " microbatches; it needs at least one of each");
      return false;
    }
    if (!placement.reverse_ranks.empty() && placement.reverse_ranks.size() != placement.ranks.size()) {
      fail("the placement gives ranks for " + std::to_string(stages) + " stages one way and for " +
           std::to_string(placement.reverse_ranks.size()) + " the other way");
      return false;
    }
    for (const auto* list : {&placement.ranks, &placement.reverse_ranks}) {
      for (std::size_t stage = 0; stage < list->size(); ++stage) {
        int rank = (*list)[stage];
        if (rank < 0 && list == &placement.ranks)
          fail("stage " + std::to_string(stage) + " is on no rank");
        else if (rank < 0 || rank >= ranks) {
          fail("stage " + std::to_string(stage) + " is placed on rank " + std::to_string(rank) +
               ", but the table has " + std::to_string(ranks) + " rows");
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
      fail("the table has " + std::to_string(computing) + " forwards, too few for " + std::to_string(stages) +
           " stages and " + std::to_string(microbatches) + " microbatches");
    }
    return report_.ok();
  }

  void place_actions() {
    std::size_t microbatches = static_cast<std::size_t>(schedule_.num_microbatches);
    positions_.assign(kStageSlots * static_cast<std::size_t>(schedule_.num_stages()) * microbatches, kAbsent);
    if (messages_) message_positions_.assign(kMessageSlots * graph_.edges.size() * microbatches, kAbsent);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& row = schedule_.rows[rank];
      for (std::size_t i = 0; i < row.size(); ++i) {
        const Action& action = row[i];
        if (action.is_idle()) continue;
        place(rank, static_cast<int>(i), action.first_part());
        if (action.kind == ActionKind::Overlap) place(rank, static_cast<int>(i), action.second_part());
      }
    }
  }

  void place(int rank, int i, const Action& part) {
    const Action& whole = schedule_.rows[rank][i];
    if (part.stage < 0 || part.stage >= schedule_.num_stages()) {
      add(ProblemKind::Shape, rank, i, whole,
          named(rank, i) + " names stage " + std::to_string(part.stage) + ", but the schedule has " +
              std::to_string(schedule_.num_stages()) + " stages");
      return;
    }
    if (part.is_message()) return place_message(rank, i, part);
    bool compute = part.is_compute() && part.kind != ActionKind::Overlap;
    if (compute && (part.microbatch < 0 || part.microbatch >= schedule_.num_microbatches)) {
      add(ProblemKind::Shape, rank, i, whole,
          named(rank, i) + " names microbatch " + std::to_string(part.microbatch) + ", but the schedule has " +
              std::to_string(schedule_.num_microbatches));
      return;
    }
    if (!on_right_rank(rank, i, part)) return;
    if (!compute) return;
    if (options_.forward_only && part.kind != ActionKind::Forward) {
      add(ProblemKind::Duplicate, rank, i, whole, named(rank, i) + " is a backward in a schedule without any");
      return;
    }
    if (part.kind == ActionKind::Forward) return take(position(kForward, part.stage, part.microbatch), rank, i);
    if (part.kind == ActionKind::BackwardWeight) return take(position(kWeight, part.stage, part.microbatch), rank, i);
    take(position(kGradient, part.stage, part.microbatch), rank, i);
    if (part.kind == ActionKind::FullBackward) take(position(kWeight, part.stage, part.microbatch), rank, i);
  }

  void take(std::int32_t& slot, int rank, int i) {
    if (slot == kAbsent) {
      slot = i;
      return;
    }
    if (!report_.problems.empty() && report_.problems.back().rank == rank && report_.problems.back().position == i)
      return;
    const Action& before = schedule_.rows[rank][slot];
    const Action& now = schedule_.rows[rank][i];
    bool same = before.kind == now.kind || before.kind == ActionKind::Overlap || now.kind == ActionKind::Overlap;
    add(ProblemKind::Duplicate, rank, i, now,
        same ? named(rank, i) + " repeats " + named(rank, slot)
             : named(rank, i) + " does again what " + named(rank, slot) + " does: a backward is either B or I and W");
  }

  bool on_right_rank(int rank, int i, const Action& part) {
    const Placement& placement = schedule_.placement;
    bool any = part.microbatch < 0 && !placement.reverse_ranks.empty() && placement.reverse_ranks[part.stage] == rank;
    int right = placement.rank_of(part.stage, part.microbatch);
    if (right == rank || any) return true;
    add(ProblemKind::Placement, rank, i, schedule_.rows[rank][i],
        named(rank, i) + " stands on rank " + std::to_string(rank) + ", but stage " + std::to_string(part.stage) +
            " is placed on rank " + std::to_string(right) + placement_hint());
    return false;
  }

  // What the table itself shows, if that is the other of the two common placements.
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
    bool up = message.kind == ActionKind::SendForward || message.kind == ActionKind::RecvBackward;
    int from = up ? message.stage : message.other_stage, to = up ? message.other_stage : message.stage;
    bool backward = message.kind == ActionKind::SendBackward || message.kind == ActionKind::RecvBackward;
    auto fail = [&](const std::string& why) {
      add(ProblemKind::Message, rank, i, message, named(rank, i) + " " + why);
    };
    if (message.microbatch < 0 || message.microbatch >= schedule_.num_microbatches) {
      return fail("names a microbatch that the schedule does not have");
    }
    int edge = graph_.find(from, to);
    if (edge < 0 || (backward && !graph_.edges[edge].gradient)) {
      return fail(std::string("moves a ") + (backward ? "gradient" : "value") + " between stages " +
                  std::to_string(from) + " and " + std::to_string(to) + " where there is none");
    }
    if (!on_right_rank(rank, i, message)) return;
    if (schedule_.placement.rank_of(from, message.microbatch) == schedule_.placement.rank_of(to, message.microbatch)) {
      return fail("moves a value between two stages of one rank, which needs no message");
    }
    int slot = message.kind == ActionKind::SendForward    ? kSendForward
               : message.kind == ActionKind::RecvForward  ? kRecvForward
               : message.kind == ActionKind::SendBackward ? kSendBackward
                                                          : kRecvBackward;
    take(message_position(slot, edge, message.microbatch), rank, i);
  }

  void check_complete() {
    auto missing = [this](const Action& action) {
      int rank = schedule_.placement.rank_of(action.stage, action.microbatch);
      add(ProblemKind::Missing, rank, -1, action, to_string(action) + " is missing on rank " + std::to_string(rank));
    };
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int m = 0; m < schedule_.num_microbatches; ++m) {
        if (position(kForward, stage, m) == kAbsent) missing(Action::forward(stage, m));
        if (options_.forward_only) continue;
        bool gradient = position(kGradient, stage, m) != kAbsent, weight = position(kWeight, stage, m) != kAbsent;
        if (!gradient && !weight)
          missing(Action::backward(stage, m));
        else if (!gradient)
          missing(Action::input(stage, m));
        else if (!weight)
          missing(Action::weight(stage, m));
      }
    }
  }

  void before(int rank, std::int32_t first, std::int32_t second, const char* what) {
    if (first > second) {
      add(ProblemKind::Order, rank, second, schedule_.rows[rank][second],
          named(rank, second) + " comes before " + named(rank, first) + ", " + what);
    }
  }

  void check_order() {
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int m = 0; m < schedule_.num_microbatches && !options_.forward_only; ++m) {
        int rank = schedule_.placement.rank_of(stage, m);
        before(rank, position(kForward, stage, m), position(kGradient, stage, m), "its forward");
        before(rank, position(kGradient, stage, m), position(kWeight, stage, m), "its input backward");
        if (m > 0 && schedule_.placement.rank_of(stage, m - 1) == rank &&
            position(kWeight, stage, m - 1) > position(kWeight, stage, m)) {
          report_.weights_in_microbatch_order = false;
        }
      }
    }
    check_stage_actions();
  }

  // REDUCE_GRAD after the stage's last weight gradient; computing only between UNSHARD and RESHARD where there are
  // such.
  void check_stage_actions() {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& row = schedule_.rows[rank];
      auto has = [&row](ActionKind kind) {
        return std::any_of(row.begin(), row.end(), [kind](const Action& action) { return action.kind == kind; });
      };
      bool sharded = has(ActionKind::Unshard) || has(ActionKind::Reshard);
      if (!sharded && !has(ActionKind::ReduceGrad)) continue;
      std::vector<int> reduced(static_cast<std::size_t>(schedule_.num_stages()), -1);
      std::vector<char> whole(reduced.size(), !sharded);
      for (std::size_t i = 0; i < row.size(); ++i) {
        const Action& action = row[i];
        int pos = static_cast<int>(i);
        if (action.kind == ActionKind::Unshard || action.kind == ActionKind::Reshard) {
          bool unshard = action.kind == ActionKind::Unshard;
          if (sharded && static_cast<bool>(whole[action.stage]) == unshard) {
            add(ProblemKind::Order, rank, pos, action,
                named(rank, pos) + " finds the stage " + (unshard ? "whole" : "sharded") + " already");
          }
          whole[action.stage] = unshard;
        } else if (action.kind == ActionKind::ReduceGrad) {
          if (reduced[action.stage] >= 0) {
            add(ProblemKind::Duplicate, rank, pos, action,
                named(rank, pos) + " repeats " + named(rank, reduced[action.stage]));
          }
          reduced[action.stage] = pos;
        } else if (action.is_compute()) {
          for (const Action& part : {action.first_part(), action.second_part()}) {
            if (part.is_idle()) continue;
            if (sharded && !whole[part.stage]) {
              add(ProblemKind::Order, rank, pos, action, named(rank, pos) + " runs while its stage is sharded");
            }
            if (part.kind != ActionKind::Forward && part.kind != ActionKind::BackwardInput &&
                reduced[part.stage] >= 0) {
              add(ProblemKind::Order, rank, pos, action,
                  named(rank, pos) + " makes a gradient after " + named(rank, reduced[part.stage]));
            }
          }
        }
      }
    }
  }

  void check_messages() {
    for (int e = 0; e < static_cast<int>(graph_.edges.size()); ++e) {
      const StageEdge& edge = graph_.edges[e];
      for (int m = 0; m < schedule_.num_microbatches; ++m) {
        int low = schedule_.placement.rank_of(edge.from, m), high = schedule_.placement.rank_of(edge.to, m);
        if (low == high) continue;
        if (matched(e, m, kSendForward, ActionKind::SendForward, edge.from, low, ActionKind::RecvForward, edge.to,
                    high)) {
          before(low, position(kForward, edge.from, m), message_position(kSendForward, e, m), "which makes its value");
          before(high, message_position(kRecvForward, e, m), position(kForward, edge.to, m),
                 "which receives its input");
        }
        if (!edge.gradient || options_.forward_only) continue;
        if (matched(e, m, kSendBackward, ActionKind::SendBackward, edge.to, high, ActionKind::RecvBackward, edge.from,
                    low)) {
          before(high, position(kGradient, edge.to, m), message_position(kSendBackward, e, m), "which makes its value");
          before(low, message_position(kRecvBackward, e, m), position(kGradient, edge.from, m),
                 "which receives its gradient");
        }
      }
    }
  }

  // Both ends of a message are there; the receive's slot follows the send's.
  bool matched(int edge, int m, int send_slot, ActionKind send, int send_stage, int send_rank, ActionKind receive,
               int receive_stage, int receive_rank) {
    int sent = message_position(send_slot, edge, m), received = message_position(send_slot + 1, edge, m);
    Action sending = Action::message(send, send_stage, m, receive_stage);
    Action receiving = Action::message(receive, receive_stage, m, send_stage);
    if (sent != kAbsent && received != kAbsent) return true;
    if (sent == kAbsent && received == kAbsent) {
      add(ProblemKind::Missing, send_rank, -1, sending,
          to_string(sending) + " on rank " + std::to_string(send_rank) + " and " + to_string(receiving) + " on rank " +
              std::to_string(receive_rank) + " are missing");
    } else if (sent == kAbsent) {
      add(ProblemKind::Message, receive_rank, received, receiving,
          named(receive_rank, received) + " has no " + to_string(sending) + " on rank " + std::to_string(send_rank));
    } else {
      add(ProblemKind::Message, send_rank, sent, sending,
          named(send_rank, sent) + " has no " + to_string(receiving) + " on rank " + std::to_string(receive_rank));
    }
    return false;
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
        const Action& send = schedule_.rows[from][sent[k]];
        if (other_end(send) == schedule_.rows[to][received[k]]) continue;
        add(ProblemKind::Message, from, sent[k], send,
            named(from, sent[k]) + " meets " + named(to, received[k]) + ": each is number " + std::to_string(k + 1) +
                " from rank " + std::to_string(from) + " to rank " + std::to_string(to) +
                ", and messages of two ranks match in order");
        break;  // those behind it are off as well
      }
    }
  }

  // Where an event is to happen.
  std::pair<int, int> place_of(const Event& event) {
    const Placement& placement = schedule_.placement;
    int m = event.microbatch;
    if (event.kind <= EventKind::Weight) {
      Slot slot = event.kind == EventKind::Forward ? kForward : event.kind == EventKind::Gradient ? kGradient : kWeight;
      return {placement.rank_of(event.index, m), position(slot, event.index, m)};
    }
    const StageEdge& edge = graph_.edges[event.index];
    switch (event.kind) {
      case EventKind::SentForward:
        return {placement.rank_of(edge.from, m), message_position(kSendForward, event.index, m)};
      case EventKind::SentBackward:
        return {placement.rank_of(edge.to, m), message_position(kSendBackward, event.index, m)};
      case EventKind::PostedForward:
        return {placement.rank_of(edge.to, m), message_position(kRecvForward, event.index, m)};
      default: return {placement.rank_of(edge.from, m), message_position(kRecvBackward, event.index, m)};
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
      rank = place_of(events.missing[rank]).first;
    }
    std::string ring;
    int first = rank, length = 0;
    do {
      int stop = static_cast<int>(events.positions[rank]);
      auto [next, wanted] = place_of(events.missing[rank]);
      if (++length > 1) ring += "; ";
      if (length <= 8) {
        ring += "rank " + std::to_string(rank) + " stops at " + to_string(schedule_.rows[rank][stop]) + " (position " +
                std::to_string(stop) + "), which waits for " + named(next, wanted);
      }
      rank = next;
    } while (rank != first);
    if (length > 8) ring += "... (" + std::to_string(length) + " ranks in the ring)";
    int stop = static_cast<int>(events.positions[first]);
    add(ProblemKind::Deadlock, first, stop, schedule_.rows[first][stop], "deadlock: " + ring);
  }

  void check_memory() {
    Costs costs = options_.memory.for_stages(schedule_.num_stages(), schedule_.num_ranks());
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& row = schedule_.rows[rank];
      auto [peak, where] = schedule_internal::peak_activations(row, costs);
      report_.peak_memory.push_back(peak);
      // Sums of shares like 1/3 may miss the limit by rounding.
      if (peak > options_.memory_limit * (1 + 1e-9)) {
        add(ProblemKind::Memory, rank, where, row[where],
            named(rank, where) + " brings the activations held to " + std::to_string(peak) + ", over the limit of " +
                std::to_string(options_.memory_limit));
      }
    }
  }

  const Schedule& schedule_;
  const CheckOptions& options_;
  StageGraph graph_;
  bool messages_ = false;
  std::vector<std::int32_t> positions_, message_positions_;
  CheckReport report_;
};

}  // namespace

std::string CheckReport::text() const {
  if (ok()) return "ok";
  std::string text;
  for (const auto& problem : problems) text += (text.empty() ? "" : "\n") + problem.message;
  if (num_problems > problems.size()) text += "\n... and " + std::to_string(num_problems - problems.size()) + " more";
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
