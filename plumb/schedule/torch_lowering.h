// Lowering in torch's order: for tables that have to look as torch's do.
//
// Ranks take turns here; lower_schedule (lower.h) follows a time line. Both results run. All functions keep UNSHARD,
// RESHARD and REDUCE_GRAD where they are. Stages form the chain 0 -> 1 -> 2 -> ...
#pragma once

#include "plumb/schedule/schedule.h"

namespace plumb {

// Puts sends and receives into a table that only computes. In every round each rank, from the first on, runs its next
// entry if its input is there. A send stands right behind the entry that makes the value, and at the same moment its
// receive is appended to the other rank's row. A pair runs when both halves can. Idle entries take a turn and are
// dropped. Throws Error(Schedule) that names the entries that cannot run.
Schedule add_send_recv(const Schedule& schedule);

// Plays a lowered table in rounds: every rank has one entry a round, idle if it waits. A rank that waited for a later
// rank may still run in the same round. The longest row is the number of rounds. Throws Error(Schedule) if it stops.
Schedule simulate_send_recv(const Schedule& schedule);

// Moves receives to right before the entry that uses them. If two ranks send to each other the lower one still receives
// first, so that blocking messages meet. Throws Error(Schedule) for a receive that nothing uses.
Schedule defer_receives(const Schedule& schedule);

}  // namespace plumb
