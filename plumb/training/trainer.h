// Trains a model: the engine behind `plumb train`, plumb.Trainer and plumb::train().
//
//   plumb::TrainOptions options;
//   options.file = "gpt.pt2";
//   options.data = "text.bin";
//   options.save = "trained.pt2";
//   plumb::train(options);
//
// In one process, or as one rank of a launcher's (pipeline/environment.h). The losses and weights do not depend on
// stages and schedule, as far as the runtime's sums do not (pipeline/runtime.h).
#pragma once

#include <limits>
#include <memory>

#include "plumb/training/job.h"

namespace plumb {

struct TrainSession;

struct TrainResult {
  int64_t steps = 0;  // number of completed steps
  // Mean over all targets that count in the last step (with --loss output: over its rows). NaN if no step was done.
  double loss = std::numeric_limits<double>::quiet_NaN();
  std::optional<double> eval_loss;
  int stopped_by = 0;  // the signal of TrainHooks::stop_signal, of whichever rank
};

class Trainer {
 public:
  // Reads everything, checks it and meets the other ranks. Throws UsageError or Error.
  explicit Trainer(TrainOptions options, TrainHooks hooks = {}, TrainParts parts = {});
  // Makes a trainer for a part of a run that goes on when a process is lost (lasting.h).
  Trainer(TrainOptions options, TrainHooks hooks, TrainSession& session);
  ~Trainer();
  Trainer(const Trainer&) = delete;

  // Trains, evaluates and writes what the options ask for, once. Throws Error(Numerics) at a loss or gradients that are
  // no numbers, before the step changes a weight, and Error(InvalidState) the second time.
  TrainResult run();

 private:
  class Run;
  std::unique_ptr<Run> run_;
};

TrainResult train(const TrainOptions& options, const TrainHooks& hooks = {});

// Checks everything that can be wrong before the first step, without other ranks: throws UsageError or Error.
void check_training(const TrainOptions& options, const TrainHooks& hooks = {});

}  // namespace plumb
