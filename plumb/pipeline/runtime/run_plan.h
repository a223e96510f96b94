// Plans who sends what to whom before the first step: from the pipe's table which stages are connected, and from the
// schedule a rank's actions with their messages.
//
// Values go straight from the stage that makes them to each stage that uses them. The gradient of a value with several
// users goes from the last user to the one before, which adds its own, and so on to the maker: as many messages as one
// from each user, but the sum is formed in autograd's order in one process, so it is the same bit for bit.
#pragma once

#include <string>
#include <vector>

#include "plumb/partition/stage_io.h"
#include "plumb/pipeline/runtime/step_driver.h"
#include "plumb/pipeline/transport/transport.h"
#include "plumb/schedule/schedule.h"

namespace plumb {

// Sources and destinations of a stage's values and gradients.
struct StageWiring {
  // Inputs of the stage without repetitions, and for each input its place here.
  std::vector<ValueSource> sources;
  std::vector<int> source_of_input;

  struct Bundle {
    int stage;                 // at the other end
    std::vector<int> indices;  // indices of the values, in an order that both ends share
  };
  std::vector<Bundle> values_out;  // outputs, to later stages, ascending
  std::vector<Bundle> values_in;   // sources, from earlier stages, ascending
  std::vector<Bundle> grads_out;   // sources whose gradient goes to an earlier stage, descending

  struct GradBundle {
    int stage;
    struct Target {
      bool output;  // gradient of output `index`, or gradient that source `index` has already
      int index;
    };
    std::vector<Target> targets;
  };
  std::vector<GradBundle> grads_in;
  std::vector<bool> output_used;  // by a later stage
};

// Throws Error(InvalidArgument) as PipeTable::check() does.
std::vector<StageWiring> connect_stages(const PipeTable& table);

// Returns the edges on which values or gradients go between stages, for the schedule's checker.
StageEdges edges_of(const std::vector<StageWiring>& wiring);

struct RunAction {
  Action action;
  std::string text;  // the action's, for error messages
  // Per bundle of the stage's wiring (values_in of a forward, grads_in of a backward; values_out, grads_out): the
  // message, or -1 where the other stage is on this rank.
  std::vector<int> receives, sends;
  bool completes_gradients = false;  // no later action adds to the stage's gradients
  bool backward_is_next = false;     // see schedule.h
  // The hook that replaces this action, or null. It covers this action and the following together - 1, which it sees as
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
                 const std::vector<std::vector<bool>>& copy_peers, const ActionHooks& hooks = {});

// Gives the plan of `rank` the order in which all ranks post messages whose values stay on devices: that of the rows
// with their messages (lower.h), then tied gradients pair of ranks by pair.
void order_messages(RunPlan& plan, const Schedule& schedule, const std::vector<StageWiring>& wiring, int rank);

// Returns the table with compute actions only: overlapped pairs taken apart, no idle entries.
Schedule compute_only(const Schedule& schedule);

}  // namespace plumb
