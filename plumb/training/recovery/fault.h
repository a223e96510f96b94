// A fault on purpose, for tests and drills: `--inject 'kill rank 2 at 1F3 of step 7'`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plumb/pipeline/launch/generations.h"
#include "plumb/schedule/schedule.h"
#include "plumb/training/options.h"

namespace plumb {

struct Fault {
  enum class Kind { Kill, Stop, Raise, Flip, Rot, RotState, RotGradient };
  Kind kind = Kind::Kill;
  int rank = 0;  // among all processes
  int64_t step = 0;
  int stage = 0;      // stage of the action
  size_t action = 0;  // number of the rank's actions of the step that are done before
  std::string text;

  // Kills or stops (SIGSTOP) this process, or throws Error(ExecutionFailed). The caller flips bits.
  void happen() const;
};

// Parses "kill", "stop", "raise", "flip", "rot", "rot_state" or "rot_gradient", a rank, an action of its row of the
// schedule ("1F3": stage 1, forward, microbatch 3) and a step from 1. Throws UsageError.
Fault parse_fault(const std::string& text, const TrainOptions& options, const Schedule& schedule);

// Lets a rank's faults happen while its steps run.
class FaultTrigger {
 public:
  // `members`: the faults happen once in all generations; null: in this process. There are none in a job whose launcher
  // has started its processes again.
  FaultTrigger(const std::vector<Fault>& faults, int rank, Membership* members,
               std::function<void(const Fault&)> report);

  bool empty() const { return faults_.empty(); }
  int64_t step() const { return step_; }
  void begin_step(int64_t step);
  // `done`: actions of the step.
  void action_done(size_t done);

 private:
  std::vector<Fault> faults_;
  Membership* members_;
  std::function<void(const Fault&)> report_;
  int64_t step_ = 1;
  size_t done_before_ = 0;
};

}  // namespace plumb
