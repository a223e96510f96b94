// Lowering: adds sends, receives, UNSHARD, RESHARD and REDUCE_GRAD to a table that only computes.
#pragma once

#include "plumb/schedule/schedule.h"

namespace plumb {

struct LowerOptions {
  // OVERLAP_F_B stays one action (its messages before and after it); otherwise it becomes its forward and its backward,
  // and the forward's value leaves before the backward runs.
  bool keep_pairs = false;
  bool reduce_grad = false;  // REDUCE_GRAD of a stage right after its last weight gradient
  int max_unsharded = 0;  // > 0: UNSHARD / RESHARD around use, this many stages of a rank at most are whole at a time
};

// Puts SEND_x behind every action whose value another rank needs and RECV_x into the row of the stage that needs it:
// one message for every microbatch and edge that crosses ranks, straight from the stage that makes the value to each
// that uses it. Idle entries go.
//
// All rows follow one order in time: that of the table with F = I = W = 1, B = 2, a message standing in both its rows
// at the instant its value is made. So the result runs without deadlock even if sends and receives block until both
// ends are there and messages between two ranks may not overtake each other.
//
// Throws Error(Schedule) for a table that cannot run or has messages already. A table without any backward (evaluation)
// is taken as such.
Schedule lower_schedule(const Schedule& schedule, const StageEdges& edges = {}, const LowerOptions& options = {});

// Messages of a lowered table that meet: two that two ranks send each other, with nothing between them in either rank's
// row. Both ends post them as one (coalesced), so that they travel at the same time even where a rank has one stream
// for all its messages. For each entry of each row the position of the other one in that row, next to it, or -1.
std::vector<std::vector<int>> meeting_messages(const Schedule& lowered);

// Returns a row of a rank with UNSHARD, RESHARD and REDUCE_GRAD as the options say; idle entries go.
std::vector<Action> with_surroundings(const std::vector<Action>& row, const LowerOptions& options);

// Returns an evaluation's table: the forwards, and the entries that compute nothing.
Schedule forward_only(Schedule schedule);

}  // namespace plumb
