// torch's way from a table that only computes to one with messages, and its count of how many turns that takes: ranks
// take turns instead of following a time line (lower.h). For tables that have to look as torch's do; both ways run.
//
// All take rows with UNSHARD, RESHARD and REDUCE_GRAD in them as they are. Stages form the chain 0 -> 1 -> 2 -> ...
#pragma once

#include "plumb/schedule/schedule.h"

namespace plumb {

// In every round each rank, from the first on, runs its next entry if what it needs is there. A value for another rank
// leaves right behind the entry that made it, and in the same instant its receive goes to the end of the other rank's
// row so far. A pair runs when both halves can. Idle entries take a turn and are gone. Raises Error(Schedule) that
// names the entries nobody can run.
Schedule add_messages_in_turns(const Schedule& schedule);

// A lowered table played in rounds: every rank has an entry or an idle one a round, and who waited for a rank further
// down may still run in the same round. The longest row is the number of rounds. Raises Error(Schedule) if it stops.
Schedule play_in_turns(const Schedule& schedule);

// Receives as late as they may be: right before the entry that uses them. Where two ranks send to each other the lower
// one still receives first, so that blocking messages find each other. Raises Error(Schedule) for a receive that
// nothing uses.
Schedule defer_receives(const Schedule& schedule);

}  // namespace plumb
