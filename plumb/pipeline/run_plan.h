// A rank's actions with their messages, worked out before the first step.
#pragma once

#include <string>
#include <vector>

#include "plumb/pipeline/transport.h"
#include "plumb/pipeline/wiring.h"
#include "plumb/schedule/schedule.h"

namespace plumb {

struct RunAction {
  Action action;
  std::string text;  // of it, for messages
  // Per bundle of the stage's wiring (values_in of a forward, grads_in of a backward; values_out, grads_out): the
  // message, or -1 where the other stage is on this rank.
  std::vector<int> receives, sends;
  bool completes_gradients = false;  // of its stage: no later action adds to them
  // A forward whose whole backward is what comes next, while other microbatches wait on this rank: what it would free
  // for that moment is little beside what those hold.
  bool goes_back_at_once = false;
};

struct RunPlan {
  std::vector<RunAction> actions;
  MessagePlan messages;
};

// The plan of `rank` for a table of compute actions only. `copy_peers[a][b]`: rank a sends the gradients of shared
// parameters to rank b at the end; may be empty.
RunPlan plan_run(const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank,
                 const std::vector<std::vector<bool>>& copy_peers);

// Compute actions only, overlapped pairs taken apart, no idle entries.
Schedule compute_only(const Schedule& schedule);

}  // namespace plumb
