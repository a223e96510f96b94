// Ranks of a group beyond those that work: they wait to be needed when their launcher starts all ranks again.
#pragma once

#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

// Waits until rank 0 has called release_spares(). Throws Error(Communication) if the group's store is gone, or does not
// respond within the group's time-out.
void wait_as_spare(const ProcessGroup& group);

// Called by rank 0, which may be the one that serves the store: lets `spares` ranks go, and waits a few seconds at most
// until they have gone.
void release_spares(const ProcessGroup& group, int spares);

}  // namespace plumb
