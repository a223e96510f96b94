// Runs a rank's stages on microbatches, one forward or backward at a time. Messages and the order of actions are the
// callers' (action_runner.h, step_driver.h).
#pragma once

#include <ATen/core/Generator.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "plumb/pipeline/runtime/gradients.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/pipeline/runtime/stage.h"
#include "plumb/pipeline/transport/message.h"

namespace plumb {

// Buffers that forwards and backwards write (running statistics, scales), and parameters that forwards write, by groups
// of microbatches. Each group of a step begins with them as they were before the step. At its end they are the mean
// over all groups, summed in a binary tree; whole numbers are those of the first group. So they do not depend on the
// spread of groups over replicas.
class GroupBuffers {
 public:
  // Buffers of one stage; `groups` of its `microbatches`, each of equally many.
  GroupBuffers(std::vector<NamedTensor> buffers, int groups, int microbatches);

  const std::vector<NamedTensor>& buffers() const { return buffers_; }
  void begin_step();
  // Puts the buffers of the microbatch's group in place, for a forward or backward of it.
  void begin_microbatch(int microbatch);
  // Returns this rank's groups' results, by buffer, when all are done: the sum, or the first group's whole numbers.
  Tensors sums();
  // Takes the sums of all `groups_of_all` groups.
  void finish_step(const Tensors& sums, int groups_of_all);

 private:
  void keep();
  std::vector<NamedTensor> buffers_;
  int groups_, size_, now_ = -1;
  Tensors before_;
  std::vector<Tensors> by_group_;  // that were in place and are not now
};

// One microbatch in one stage, from its forward to the end of its backward.
struct Slot {
  std::vector<MessageValue> sources;
  std::unique_ptr<InputBoundary> boundary;
  Tensors results;  // results of the forward, until they are delivered
  Tensors outputs;  // for the backward: handles without the values' memory
  Tensors output_grads;
  Tensors seeds;         // gradients that sources have from later users
  Tensors model_inputs;  // given by a caller of StepDriver
  ModelSizes sizes;      // sizes of the model's inputs: those that came with values, later all that are known here
  Tensors input_grads;   // input gradients of the backward, until they are delivered
  DeferredWeights deferred;
  std::function<void()> own_weight_work;
  at::Tensor loss;
  // The parts of the microbatch's work that are done, for hooks that leave something out.
  bool went_forward = false, went_back = false, weights_due = false;
  // The stages in whose place a caller of StepDriver gave values and gradients.
  std::set<int> values_given_for, grads_given_for;
};

struct LocalStage {
  int stage = 0;
  std::shared_ptr<StageFunction> function;
  const StageWiring* wiring = nullptr;
  int num_outputs = 0;
  std::vector<Slot> slots = {};                              // by microbatch
  std::unique_ptr<GradientAccumulator> gradients = nullptr;  // null: the stage is run by hand
  std::unique_ptr<GroupBuffers> buffers = nullptr;           // null: all microbatches are one group
  bool recompute_checked = false;     // the first forward compares what it would compute again with what it has
  RecomputeReport recomputed = {};    // last report of a training step's forward
  int64_t nothing_to_recompute = -1;  // number of input values of a microbatch that kept everything
};

// The constant parts of a pipeline, the same from step to step.
struct PipelineSetup {
  PipeTable layout;
  Schedule schedule;  // compute actions only; empty: stages are run by hand
  PipelineOptions options;
  std::vector<StageWiring> wiring;
  int rank = 0;

  int last_stage() const { return layout.num_stages() - 1; }
  // Groups of microbatches in this replica.
  int groups_here() const { return std::max(1, options.gradient_groups / options.replicas.size()); }
};

// The microbatches of a step and their results. All lists are by microbatch.
struct StepBatch {
  const std::vector<Tensors>* inputs = nullptr;  // null: no step runs
  const std::vector<Tensors>* targets = nullptr;
  std::vector<int64_t> rows;
  std::vector<double> weights;  // weights of the losses
  std::vector<Tensors> outputs = {};
  Tensors losses = {};
  std::vector<Tensors> input_grads = {};  // empty: no input of the model requires a gradient
};

class StageRunner {
 public:
  StageRunner(PipelineSetup setup, const std::map<int, std::shared_ptr<StageFunction>>& functions);
  StageRunner(const StageRunner&) = delete;

  const PipelineSetup setup;
  std::map<int, LocalStage> stages;
  StepBatch batch;
  bool training = false;
  // The place where random numbers of the next step begin.
  std::int64_t step_number = 0;
  std::vector<std::int64_t> first_rows;  // first rows of the next step's microbatches, then their end; empty: not known

  // Makes room in the slot for what arrives.
  void prepare(LocalStage& stage, Slot& slot) const;
  // Puts values and gradients that arrive from stage `from` into the slot. Dynamic outputs bring their number.
  void take_values(LocalStage& stage, Slot& slot, int from, std::vector<MessageValue> values) const;
  void take_grads(LocalStage& stage, Slot& slot, int from, const std::vector<MessageValue>& values) const;
  // Returns the bundle's values, and gradients of the stage `of`, with the formats in which they cross.
  std::vector<MessageValue> values_for(int from, const StageWiring::Bundle& bundle, const Tensors& outputs) const;
  std::vector<MessageValue> grads_for(const LocalStage& of, const StageWiring::Bundle& bundle,
                                      const Tensors& grads) const;
  std::vector<StageWiring::GradBundle::Target> targets_of(const StageWiring::GradBundle& bundle, size_t count) const;

  // --- run_forward.cpp ---
  // Returns the CPU's generator, and those of the devices that stages are on.
  std::vector<at::Generator> generators() const;
  void seed_generator(int stage, int m) const;
  // Leaves the results in the slot. `recompute`: where to start what recomputes cheap results; null keeps all results.
  void run_function(LocalStage& stage, Slot& slot, int m, std::optional<CheapRecompute>* recompute);
  void finish_recompute(LocalStage& stage, const Slot& slot, std::optional<CheapRecompute>& recompute) const;
  const Tensors* model_inputs(const Slot& slot, int m) const;
  void check_results(const LocalStage& stage, Slot& slot, int m, bool hooked);
  void keep_for_backward(const LocalStage& stage, Slot& slot) const;

  // --- backward ---
  // Leaves the inputs' gradients in the slot.
  void run_backward(ActionKind kind, LocalStage& stage, Slot& slot, int m, const at::Tensor& loss = {});
  void check_input_grads(const LocalStage& stage, const Slot& slot, int m) const;
  // Adds to the gradients of the model's own inputs.
  void keep_input_grads(const LocalStage& stage, int m, const Tensors& grads);

 private:
  const std::map<size_t, StageInputPort> cut_inputs_ = setup.layout.model_inputs();
  std::vector<int> places(const StageWiring::Bundle& bundle, size_t count) const;
  std::uint64_t seed_of_step() const;
  // Returns the microbatch's first row, where rows are known, else its number, among those of all replicas.
  std::uint64_t place_of_microbatch(int m) const;
  void start_recompute(LocalStage& stage, const Tensors& inputs, std::optional<CheapRecompute>& recompute) const;
  // Adds the sizes of the model's inputs that are given here, if any are not as in the layout.
  void complete_sizes(Slot& slot, int m) const;
  void gather_inputs(LocalStage& stage, Slot& slot, int m, Tensors& values, std::vector<bool>& wants);
  void finish_model(int m, Slot& slot, bool hooked);
  void check_writes(const LocalStage& stage, const Tensors& values, at::IntArrayRef versions, int m) const;
  bool shared_on_this_rank(const ValueSource& source, int m) const;
  void start_of_backward(const LocalStage& stage, const Slot& slot, int m, const at::Tensor& loss, Tensors& outputs,
                         Tensors& grads) const;
};

// Returns `x` where the stage computes.
at::Tensor moved_to(const LocalStage& stage, const at::Tensor& x);

// Returns values that stay in this process, rounded as if they had traveled.
std::vector<MessageValue> arrived(std::vector<MessageValue> values);

// Returns "output 0 of stage 1, microbatch 2".
std::string value_name(const char* what, size_t index, int stage, int m);

// Throws Error(Numerics) for a value that is not finite; `name` gives its name.
void check_finite(const at::Tensor& t, const std::function<std::string()>& name);

}  // namespace plumb
