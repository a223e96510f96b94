// Hooks in the place of actions, and the parts of an action that they are made of.
//
// Before a hook the engine waits for its action's messages; after it the engine checks the results, hands them over and
// records the action. Around a hook in the place of a weight gradient the engine accumulates: `.grad` is the step's.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "plumb/partition/stage_io.h"
#include "plumb/pipeline/runtime/stage.h"
#include "plumb/schedule/action.h"

namespace plumb {

class StageRunner;

// Outside of a step, or for a value that does not exist, every function throws Error(InvalidState) or
// Error(InvalidArgument). A forward and a backward of one step may run at once, on two threads.
class StepDriver {
 public:
  // Drives the step that a pipeline runs.
  explicit StepDriver(StageRunner& runner);
  // Drives one stage by hand, outside of any step: the caller gives it values and gradients, and takes them.
  StepDriver(PipeTable layout, int stage, std::shared_ptr<StageFunction> function);
  StepDriver(StepDriver&&) noexcept;
  ~StepDriver();

  // Runs the stage's function on its arrived inputs.
  void forward(int stage, int microbatch);
  // kind: FullBackward, BackwardInput or BackwardWeight. The last stage begins with `loss` if there is one, which is
  // weighted already, else with the loss of the microbatch.
  void backward(ActionKind kind, int stage, int microbatch, const at::Tensor& loss = {});

  // Sets the loss of a microbatch, on the rank of the last stage, in place of PipelineOptions::loss.
  void set_loss(int microbatch, const at::Tensor& loss);
  // Gives a stage of this rank all outputs of stage `from`, in place of what that stage handed over. `sizes`: of the
  // model's inputs they come from, where they are not as in the layout.
  void take_outputs(int stage, int microbatch, int from, const Tensors& outputs, const ModelSizes& sizes = {});
  // Gives a stage of this rank the gradients input_gradients(from, microbatch, stage).
  void take_gradients(int stage, int microbatch, int from, const Tensors& gradients);
  // Gives the model's inputs, in place of the step's. Where one is undefined the step's stays.
  void take_model_inputs(int stage, int microbatch, const Tensors& inputs);
  // Returns the gradients that go from `stage` to the stage `to` after a backward; empty if none do.
  Tensors input_gradients(int stage, int microbatch, int to) const;

 private:
  std::unique_ptr<StageRunner> own_;  // runner of a stage driven by hand; null: a pipeline's runner is used
  StageRunner* runner_;
};

// A function in the place of an action: Forward, FullBackward, BackwardInput, BackwardWeight; Overlap, of which the
// parts are one action then; Unshard and Reshard, which do nothing without one; ReduceGrad, which stands for the work
// on a stage's complete gradients, the division by microbatches included.
using ActionHook = std::function<void(const Action& action, StepDriver& driver)>;

struct HookPoint {
  static constexpr int kEveryStage = -1;
  ActionKind kind = ActionKind::Idle;
  int stage = kEveryStage;
  auto operator<=>(const HookPoint&) const = default;
};

// A stage's own hook goes before the one of every stage.
using ActionHooks = std::map<HookPoint, ActionHook>;

// Returns null if there is none.
const ActionHook* find_hook(const ActionHooks& hooks, ActionKind kind, int stage);

}  // namespace plumb
