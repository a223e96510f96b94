// A training that goes on when a process or a host is lost, as a process of plumb's own launcher (pipeline/launch.h) or
// of torchrun.
//
// When a rank is lost, every other one gets Error(Communication). It drops everything that belongs to the group of that
// generation, keeps its process, its model and the copies of state (state_copies.h), and waits for the next generation
// (pipeline/generations.h). There all ranks agree on the last edge of which everything is held, take it from the copies
// or, if there is none, from the last checkpoint, and go on. Any other error ends the process: its rank is lost.
//
// torchrun's agents end all processes when one is lost, meet in their rendezvous, and start all again: on the hosts
// that are left, and those that have come. A keeper on each host has held the copies (pipeline/launch/keeper.h), so the
// new processes go on likewise. Only those agents that reach the rendezvous' store start anything.
#pragma once

#include "plumb/pipeline/launch/generations.h"
#include "plumb/training/recovery/state_copies.h"
#include "plumb/training/trainer.h"

namespace plumb {

// A process's state that lasts from one generation to the next.
struct TrainSession {
  std::optional<Membership> members;  // null: torchrun's process, which has one generation
  RankEnvironment place;              // in the generation that runs
  StateCopies copies;
  std::shared_ptr<TrainJob> job;
  bool was_used = false;  // the job's weights are no longer the file's
};

// As train(); a spare process returns when it was not needed.
TrainResult train_lasting(const TrainOptions& options, const TrainHooks& hooks, Membership members);

// As train(), as a process of torchrun's agent, which is this process's parent. Ranks beyond
// those that the options need are spares: they send what their hosts hold, and return when the training has ended. With
// options.recut fewer ranks take another layout. `before_steps` is called when all have met, not on a spare. Call it
// while the process is small (keeper.h).
TrainResult train_on_hosts(const TrainOptions& options, const TrainHooks& hooks, const RankEnvironment& place,
                           const std::function<void()>& before_steps);

// Returns the most processes, at most `left`, that the training can be run on with the bits of the options' own layout:
// fewer stages, or with one stage fewer replicas. 0: none.
int fewer_processes(const TrainOptions& options, int left);
// Returns its options on `processes`: the cut balanced anew, the schedule plumb's quickest for stages of equal cost.
TrainOptions options_for(const TrainOptions& options, int processes);

}  // namespace plumb
