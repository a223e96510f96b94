// Simulates a schedule event by event, as far as it runs. Checker, simulator and lowering build on it. For this room.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plumb/schedule/schedule.h"
#include "plumb/schedule/simulate.h"

namespace plumb::schedule_internal {

// The edges that enter and leave every stage. Throws Error(InvalidArgument) for edges that do not lead up, are out of
// range or given twice.
struct StageGraph {
  StageGraph(const StageEdges& edges, int num_stages);
  // Index of the edge between two stages, or -1.
  int find(int from, int to) const;

  StageEdges edges;
  std::vector<std::vector<int>> in, out;  // edge indices by stage; `out` in the order of consumers
};

enum class EventKind : std::uint8_t {
  Forward,
  Gradient,
  Weight,
  SentForward,
  SentBackward,
  PostedForward,
  PostedBackward
};

// Happens once for a microbatch: a stage has computed (Gradient: the gradient of its input is there), a message was
// sent, or its receiver is ready for it.
struct Event {
  EventKind kind = EventKind::Forward;
  int index = -1;  // stage, or edge for messages
  int microbatch = -1;
  bool operator==(const Event&) const = default;
};

// Returns the rank that makes an event happen.
int rank_of(const Event& event, const StageGraph& graph, const Placement& placement);

// ends_of() returns the stages that a message's value goes from and to in the forward. event_of() returns the event of
// its entry in a row (index -1: no edge leads there).
std::pair<int, int> ends_of(const Action& message);
Event event_of(const Action& message, const StageGraph& graph);

// A value for every event.
template <class T>
class EventTable {
 public:
  EventTable(const StageGraph& graph, int num_microbatches, bool messages, T none)
      : stages_(graph.in.size()),
        edges_(graph.edges.size()),
        microbatches_(num_microbatches),
        values_((3 * stages_ + (messages ? 4 * edges_ : 0)) * microbatches_, none) {}
  T& operator[](const Event& event) {
    const auto kind = static_cast<std::size_t>(event.kind), of_stages = std::min<std::size_t>(kind, 3);
    const std::size_t row = of_stages * stages_ + (kind - of_stages) * edges_ + event.index;
    return values_[row * microbatches_ + event.microbatch];
  }

 private:
  std::size_t stages_, edges_, microbatches_;
  std::vector<T> values_;
};

struct EventSimulationOptions {
  bool blocking_receives = false;  // a rank stops at a RECV until the message has been sent
  bool blocking_sends = false;     // and at a SEND until its receiver has come to the RECV
  // OVERLAP_F_B waits for all its inputs and ends as one; otherwise forward and backward as two that follow each other.
  bool pairs_at_once = true;
  bool keep_spans = true;
};

struct EventSimulation {
  // The table's indices must be within range (check.h makes sure; messages only along edges).
  EventSimulation(const Schedule& schedule, const StageGraph& graph, const Costs& costs,
                  EventSimulationOptions options = {});

  bool finished() const { return stuck_ranks.empty(); }

  std::vector<std::vector<Span>> spans;
  std::vector<double> busy;            // by rank: time spent computing
  std::vector<std::size_t> positions;  // by rank: the first entry that did not run
  std::vector<Event> missing;          // by rank: the event that this entry waits for
  std::vector<int> stuck_ranks;
};

// Returns whether it trains: an evaluation's table only goes forward.
bool has_backward(const Schedule& schedule);

// Returns the rows with every pair as a forward and a backward that follow each other, without idle entries.
std::vector<std::vector<Action>> without_pairs(const std::vector<std::vector<Action>>& rows);

// Returns the entry at the other end of a message: of a send its receive, of a receive its send.
Action other_end(const Action& message);

}  // namespace plumb::schedule_internal
