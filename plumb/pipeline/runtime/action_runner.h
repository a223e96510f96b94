// Runs a rank's actions: waits for their messages, runs the stage or the hook in its place, and hands the results over.
#pragma once

#include <set>
#include <span>
#include <vector>

#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/runtime/stage_runner.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {

class ActionRunner {
 public:
  ActionRunner(StageRunner& runner, Transport& transport)
      : runner_(runner), setup_(runner.setup), transport_(transport) {}

  void begin_step();
  // Runs one action, or several that a hook runs as one.
  void run(std::span<const RunAction> parts);
  // Runs the stage's ReduceGrad hook on its complete gradients, once a step.
  void reduce_by_hook(int stage);
  // Returns whether the stage's hook has run in this step.
  bool is_reduced(int stage) const { return reduced_.contains(stage); }

  // This rank's events of the step, in order.
  std::vector<TimelineEvent> timeline;

 private:
  AgreedValues agreed_grads(const LocalStage& stage, const StageWiring::GradBundle& bundle, const Slot& slot) const;
  void receive(const RunAction& run, LocalStage& stage, Slot& slot);
  void forward(const RunAction& run, LocalStage& stage, Slot& slot);
  void backward(const RunAction& run, LocalStage& stage, Slot& slot);
  void run_hook(std::span<const RunAction> parts);
  void call_hook(std::span<const RunAction> parts, std::span<const RunAction> left);
  void finish_hooked(const RunAction& run, LocalStage& stage, Slot& slot);
  void send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs);
  void deliver_input_grads(const RunAction& run, LocalStage& stage, Slot& slot);

  StageRunner& runner_;
  const PipelineSetup& setup_;
  Transport& transport_;
  std::set<int> reduced_;  // stages
};

}  // namespace plumb
