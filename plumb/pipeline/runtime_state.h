// Inside of Pipeline and StepDriver, for runtime.cpp, run_*.cpp and step_driver.cpp only.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <optional>
#include <set>
#include <span>

#include "plumb/core/str.h"
#include "plumb/pipeline/gradients.h"
#include "plumb/pipeline/group_buffers.h"
#include "plumb/pipeline/replicas.h"
#include "plumb/pipeline/run_plan.h"
#include "plumb/pipeline/runtime.h"
#include "plumb/pipeline/shared_parameters.h"
#include "plumb/pipeline/transport.h"

namespace plumb {

// One microbatch in one stage, from its forward to the end of its backward.
struct Slot {
  std::vector<MessageValue> sources;
  std::unique_ptr<InputBoundary> boundary;
  Tensors results;  // of the forward, until they are handed over
  Tensors outputs;  // for the backward: handles without the values' memory
  Tensors output_grads;
  Tensors seeds;         // gradients that sources have from later users
  Tensors model_inputs;  // given by a caller of StepDriver
  ModelSizes sizes;     // of the model's inputs, as far as they came with values and then as far as they are known here
  Tensors input_grads;  // of the backward, until they are handed over
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
  std::vector<Slot> slots;
  std::unique_ptr<GradientAccumulator> gradients;
  std::unique_ptr<GroupBuffers> buffers;  // none: all microbatches are one group
  int num_outputs = 0;
  bool recompute_checked = false;     // the first forward holds what it would compute again against what it has
  RecomputeReport recomputed;         // of the last forward of a training step
  int64_t nothing_to_recompute = -1;  // a microbatch whose inputs have so many values kept everything
};

// `x` where the stage computes.
inline at::Tensor moved_to(const LocalStage& stage, const at::Tensor& x) {
  if (!x.defined()) return x;
  const auto device = stage.function->device();
  return device && !device->is_meta() && x.device() != *device ? x.detach().to(*device) : x;
}

struct PipelineState {
  PipelineLayout layout;
  Schedule schedule;  // compute actions only
  PipelineOptions options;
  Transport transport;
  std::vector<StageWiring> wiring;
  std::map<int, LocalStage> stages;
  SharedParameters shared;
  std::unique_ptr<ReplicaSums> replicas;  // none: no other replicas
  RunPlan train_plan, eval_plan;
  std::int64_t step_number = 0;
  std::vector<std::int64_t> first_rows;  // of the next step's microbatches and, last, the end; empty: not known
  std::vector<TimelineEvent> timeline;
  bool training = false;
  bool by_hand = false;  // one stage, without steps
  // State of the running step.
  const std::vector<Tensors>* inputs = nullptr;
  const std::vector<Tensors>* targets = nullptr;
  std::vector<double> weights;  // of microbatches' losses
  std::vector<Tensors> model_outputs;
  Tensors losses;
  std::vector<int64_t> batch_rows;  // by microbatch
  at::Tensor loss;                  // as StepResult has it
  std::vector<Tensors> input_grads;
  std::set<int> reduced;  // stages whose ReduceGrad hook has run

  explicit PipelineState(ProcessGroup group) : transport(std::move(group)) {}

  int rank() const { return transport.group().rank(); }
  std::string me() const { return str("rank ", transport.group().world_rank(rank())); }
  int last_stage() const { return layout.num_stages() - 1; }

  // --- run_step.cpp ---
  StepResult run(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt, std::vector<int64_t> rows, bool train,
                 int64_t rows_of_all = 0);

  // --- run_action.cpp ---
  // Runs one action, or several that a hook runs as one: waits for messages, computes, hands the results over.
  void run_actions(std::span<const RunAction> parts);
  // Runs the stage's ReduceGrad hook on its complete gradients.
  void reduce_by_hook(int stage);
  // Values and gradients that arrive at a stage of this rank. With dynamic outputs they say how many there are.
  void take_values(LocalStage& stage, Slot& slot, int from, std::vector<MessageValue> values) const;
  void take_grads(LocalStage& stage, Slot& slot, int from, const std::vector<MessageValue>& values) const;
  // With the formats in which they cross. `from`: the stage of the outputs; `of`: the one of the gradients.
  std::vector<MessageValue> values_for(int from, const StageWiring::Bundle& bundle, const Tensors& outputs) const;
  std::vector<MessageValue> grads_for(const LocalStage& of, const StageWiring::Bundle& bundle,
                                      const Tensors& grads) const;
  std::vector<int> places(const StageWiring::Bundle& bundle, size_t count) const;
  std::vector<StageWiring::GradBundle::Target> targets_of(const StageWiring::GradBundle& bundle, size_t count) const;
  void prepare(LocalStage& stage, Slot& slot) const;

  // --- run_forward.cpp ---
  // The CPU's, and those of the devices that stages are on.
  std::vector<at::Generator> generators() const;
  std::uint64_t seed_of_step() const;
  // Returns the microbatch's first row, where rows are known, else its number, among those of all replicas.
  std::uint64_t place_of_microbatch(int m) const;
  void seed_generator(int stage, int m) const;
  void start_recompute(LocalStage& stage, const Tensors& inputs, std::optional<CheapRecompute>& recompute) const;
  void finish_recompute(LocalStage& stage, const Slot& slot, std::optional<CheapRecompute>& recompute) const;
  // Leaves the results in the slot.
  // `recompute`: where to start what recomputes cheap results; nullptr where all is kept.
  void run_function(LocalStage& stage, Slot& slot, int m, std::optional<CheapRecompute>* recompute);
  // Adds the sizes of the model's inputs that are given here, if any are not as in the layout.
  void complete_sizes(Slot& slot, int m) const;
  const Tensors* model_inputs(const Slot& slot, int m) const;
  void check_results(const LocalStage& stage, Slot& slot, int m, bool hooked);
  void keep_for_backward(const LocalStage& stage, Slot& slot) const;

  // Returns the number of this replica's groups of microbatches.
  int groups_here() const { return std::max(1, options.gradient_groups / options.replicas.size()); }

  // --- run_backward.cpp ---
  // Leaves the inputs' gradients in the slot.
  void run_backward(ActionKind kind, LocalStage& stage, Slot& slot, int m, const at::Tensor& loss = {});
  void check_input_grads(const LocalStage& stage, const Slot& slot, int m) const;
  // Keeps the gradients of the model's own inputs.
  void keep_input_grads(const LocalStage& stage, int m, const Tensors& grads);

 private:
  void check_batch(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt,
                   const std::vector<int64_t>& rows) const;
  void begin(bool train, const std::vector<int64_t>& rows, int64_t rows_of_all);
  void run_row(const RunPlan& plan);
  std::vector<AgreedValue> agreed_with(const CopyGroup& group) const;
  void sum_tied_gradients(const RunPlan& plan);
  void finish_gradients(StepResult& done);
  void finish_buffers(const std::map<int, Tensors>& sums);
  StepResult result(const std::vector<int64_t>& rows);

  AgreedValues agreed_grads(const LocalStage& stage, const StageWiring::GradBundle& bundle, const Slot& slot) const;
  void receive(const RunAction& run, LocalStage& stage, Slot& slot);
  void forward(const RunAction& run, LocalStage& stage, Slot& slot);
  void backward(const RunAction& run, LocalStage& stage, Slot& slot);
  void run_hook(std::span<const RunAction> parts);
  void call_hook(std::span<const RunAction> parts, std::span<const RunAction> left);
  void finish_hooked(const RunAction& run, LocalStage& stage, Slot& slot);
  void send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs);
  void deliver_input_grads(const RunAction& run, LocalStage& stage, Slot& slot);

  void gather_inputs(LocalStage& stage, Slot& slot, int m, Tensors& values, std::vector<bool>& wants);
  void finish_model(int m, Slot& slot, bool hooked);
  void check_writes(const LocalStage& stage, const Tensors& values, at::IntArrayRef versions, int m) const;
  bool shared_on_this_rank(const ValueSource& source, int m) const;
  void start_of_backward(const LocalStage& stage, const Slot& slot, int m, const at::Tensor& loss, Tensors& outputs,
                         Tensors& grads) const;
};

// Values that stay in this process, rounded as if they had traveled.
std::vector<MessageValue> arrived(std::vector<MessageValue> values);

// "output 0 of stage 1, microbatch 2"
std::string value_name(const char* what, size_t index, int stage, int m);

// Throws Error(Numerics) for a value that is not finite; `name` gives its name.
void check_finite(const at::Tensor& t, const std::function<std::string()>& name);

}  // namespace plumb
