#include "plumb/schedule/rank_memory.h"

#include <map>
#include <optional>
#include <tuple>

namespace plumb::schedule_internal {
namespace {

// The messages of a rank that wait: those that came before the one that an action needs, as a peer's messages come in
// the order in which it sends them, and buffers.
class MessageMemory {
 public:
  MessageMemory(const Schedule& schedule, int rank, const RankCosts& costs)
      : schedule_(schedule), rank_(rank), costs_(costs), incoming_(schedule.rows.size()) {
    std::map<Taker, std::size_t> positions;  // messages of this rank's, numbered for each peer
    std::vector<std::vector<bool>> taken(schedule.rows.size());
    for (const Action& action : schedule.rows[rank]) {
      for (const Action& part : {action.first_part(), action.second_part()}) {
        const int to = part.is_compute() ? stage_after(part.kind, part.stage) : -1, peer = rank_at(to, part.microbatch);
        if (peer < 0 || peer == rank) continue;
        positions[{part.kind == ActionKind::Forward, to, part.microbatch}] = taken[peer].size();
        taken[peer].push_back(false);
      }
    }
    for (int peer = 0; peer < schedule.num_ranks(); ++peer) {
      if (peer == rank) continue;
      std::size_t received = 0;  // the peer acknowledges a message when it has taken all before it, too
      for (const Action& action : schedule.rows[peer]) {
        for (const Action& part : {action.first_part(), action.second_part()}) {
          if (!part.is_compute()) continue;
          const auto own = positions.find({part.kind == ActionKind::Forward, part.stage, part.microbatch});
          if (part.kind != ActionKind::BackwardWeight && own != positions.end()) taken[peer][own->second] = true;
          while (received < taken[peer].size() && taken[peer][received]) ++received;
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
    const int to = stage_after(action.kind, action.stage), peer = rank_at(to, action.microbatch);
    if (peer >= 0 && peer != rank_) {
      const int boundary = std::min(to, action.stage);
      change_ = costs_.buffers[boundary] > 0 ? costs_.sent[boundary] : 0;
      sent_[peer].sizes.push_back(change_);
    }
    return change;
  }

 private:
  using Taker = std::tuple<bool, int, int>;  // the action that takes a message: forward or not, stage, microbatch
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

  // Returns a stage's rank; -1 if there is no such stage.
  int rank_at(int stage, int microbatch) const {
    const bool exists = stage >= 0 && stage < schedule_.num_stages();
    return exists ? schedule_.placement.rank_of(stage, microbatch) : -1;
  }
  void add(int peer, const Action& action, std::size_t received) {
    const int to = stage_after(action.kind, action.stage), boundary = std::min(to, action.stage);
    if (rank_at(to, action.microbatch) != rank_) return;
    const bool posted = costs_.buffers[boundary] > 0;
    places_[{action.kind == ActionKind::Forward, to, action.microbatch}] = {peer, incoming_[peer].size()};
    incoming_[peer].push_back({posted ? costs_.buffers[boundary] : costs_.sent[boundary], posted, received});
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
  const RankCosts& costs_;
  std::vector<std::vector<Message>> incoming_;           // by peer, in the order in which it sends
  std::map<Taker, std::pair<int, std::size_t>> places_;  // messages by the action that takes them
  std::map<int, Sent> sent_;                             // by peer
  double change_ = 0;                                    // for the next action
};

}  // namespace

std::pair<double, int> peak_memory(const Schedule& schedule, int rank, const RankCosts& costs) {
  const std::vector<Action>& row = schedule.rows[rank];
  std::optional<MessageMemory> messages;
  if (std::ranges::any_of(costs.sent, [](double bytes) { return bytes > 0; })) messages.emplace(schedule, rank, costs);
  RankMemory memory(costs);
  int where = -1;
  for (std::size_t i = 0; i < row.size(); ++i) {
    for (const Action& part : {row[i].first_part(), row[i].second_part()}) {
      if (!part.is_compute()) continue;
      if (messages) memory.hold(messages->begin(part));
      if (memory.run(part.kind, part.stage)) where = static_cast<int>(i);
    }
  }
  return {memory.peak(), where};
}

}  // namespace plumb::schedule_internal
