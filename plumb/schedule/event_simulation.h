// Simulates a schedule event by event, as far as it runs. Checker, simulator and lowering are built on it. Internal to
// this room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plumb/schedule/schedule.h"
#include "plumb/schedule/simulate.h"

namespace plumb::schedule_internal {

// The edges that enter and leave every stage. Raises Error(InvalidArgument) for edges that do not lead up, are out of
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

// The most activations a rank's row holds, in the unit of costs.activation (a list by stage), and the entry that gets
// there first (-1 if nothing is ever held).
std::pair<double, int> peak_activations(const std::vector<Action>& row, const Costs& costs);

// The entry at the other end of a message: of a send its receive, of a receive its send.
Action other_end(const Action& message);

}  // namespace plumb::schedule_internal
