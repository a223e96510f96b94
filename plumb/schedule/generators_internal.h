// Shared by the generators. Internal to this room.
#pragma once

#include "plumb/schedule/schedule.h"

namespace plumb::schedule_internal {

// Returns an empty table with its placement. Throws Error(InvalidArgument) for counts below one or too large to index.
Schedule new_table(const char* name, int num_ranks, int num_microbatches, int stages_per_rank, bool v_shape);

// Removes the microbatches from `num_microbatches` on. The remaining entries do not depend on them.
void drop_microbatches(Schedule& schedule, int num_microbatches);

}  // namespace plumb::schedule_internal
