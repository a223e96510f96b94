// A training's hashes (--hashes): of its state after each step, and of one step that is done again (--replay) of every
// value and gradient.
#pragma once

#include "plumb/recording/recorder.h"
#include "plumb/training/step/train_step.h"

namespace plumb {

// Returns the options as they are, or those of a replay: without files but the hashes, evaluation and verdict.
TrainOptions without_outputs(TrainOptions options);

class StepHashes {
 public:
  // `rank`: among all processes. `after`: the step that the run goes on after. The options and the step must outlive
  // it.
  StepHashes(const TrainOptions& options, int rank, TrainStep& step, std::optional<int64_t> after);

  void begin_step(int64_t step);
  // Takes the summed gradients of the step that is done again.
  void gradients();
  // Takes parameters and buffers after the step, and the optimizer's state, and writes the step.
  void end_step(const NamedTensors& held);

 private:
  void add(const std::string& name, const char* kind, const at::Tensor& tensor);
  const TrainOptions& o_;
  TrainStep& step_;
  Recorder recorder_;
};

}  // namespace plumb
