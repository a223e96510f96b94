// A rank's actions with their messages, worked out before the first step.
#pragma once

#include <string>
#include <vector>

#include "plumb/pipeline/step_driver.h"
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
  // This forward's backward is the next action and other microbatches are in flight, so recomputing would save little.
  bool backward_is_next = false;
  // The hook that replaces this action, or null. It covers this action and the following together - 1 and sees them as
  // one action, `hooked`.
  const ActionHook* hook = nullptr;
  int together = 1;
  Action hooked;
};

struct RunPlan {
  std::vector<RunAction> actions;
  MessagePlan messages;
};

// Returns the plan of `rank`. Messages, idle entries and actions around use (UNSHARD and the like) without a hook are
// left out, pairs without one are taken apart. `copy_peers[a][b]`: rank a sends the gradients of shared parameters to
// rank b at the end; may be empty. `hooks` must outlive the plan.
RunPlan plan_run(const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank,
                 const std::vector<std::vector<bool>>& copy_peers, const ActionHooks& hooks = no_hooks());

// Gives the plan of `rank` the order in which all ranks post messages whose values stay on devices: that of the rows
// with their messages (lower.h), then tied gradients pair of ranks by pair.
void order_messages(RunPlan& plan, const Schedule& schedule, const StageEdges& edges, int rank);

// Compute actions only, overlapped pairs taken apart, no idle entries.
Schedule compute_only(const Schedule& schedule);

}  // namespace plumb
