// Inside of Pipeline, for runtime.cpp, run_stage.cpp and run_step.cpp only.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "plumb/pipeline/gradients.h"
#include "plumb/pipeline/replicas.h"
#include "plumb/pipeline/run_plan.h"
#include "plumb/pipeline/runtime.h"
#include "plumb/pipeline/shared_parameters.h"
#include "plumb/pipeline/transport.h"

namespace plumb {

inline at::Generator cpu_generator() { return at::detail::getDefaultCPUGenerator(); }

// One microbatch in one stage, from its forward to the end of its backward.
struct Slot {
  std::vector<MessageValue> sources;
  std::unique_ptr<InputBoundary> boundary;
  Tensors outputs;  // for the backward: handles without the values' memory
  Tensors output_grads;
  Tensors seeds;  // gradients that sources have from later users
  DeferredWeights deferred;
  std::function<void()> own_weight_work;
  at::Tensor loss;
};

struct LocalStage {
  int stage = 0;
  std::shared_ptr<StageFunction> function;
  const StageWiring* wiring = nullptr;
  std::vector<Slot> slots;
  std::unique_ptr<GradientKeeper> gradients;
  int num_outputs = 0;
  bool recompute_checked = false;  // the first forward holds what it would compute again against what it has
  RecomputeReport recomputed;      // of the last forward of a training step
};

struct Pipeline::State {
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
  std::vector<TimelineEvent> timeline;
  bool training = false;
  // Of the step that runs.
  const std::vector<Tensors>* inputs = nullptr;
  const std::vector<Tensors>* targets = nullptr;
  std::vector<double> weights;  // of microbatches' losses
  std::vector<Tensors> model_outputs;
  Tensors losses;
  std::vector<Tensors> input_grads;

  explicit State(ProcessGroup group) : transport(std::move(group)) {}

  int rank() const { return transport.group().rank(); }
  // Of a microbatch that arrives: an open layout's messages say how many values there are.
  void arrive(Slot& slot, const StageWiring::Bundle& bundle, std::vector<MessageValue> values) const;
  void arrive(Slot& slot, const StageWiring::GradBundle& bundle, const std::vector<MessageValue>& values) const;
  int last_stage() const { return layout.num_stages() - 1; }

  // --- run_step.cpp ---
  StepResult run(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt, std::vector<int64_t> rows,
                 bool train);

  // --- run_stage.cpp ---
  // Runs one action: waits for its messages, computes, hands its results over.
  void run_action(const RunAction& run);

 private:
  void check_batch(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt,
                   const std::vector<int64_t>& rows) const;
  void begin(bool train, const std::vector<int64_t>& rows);
  void sum_copies(const RunPlan& plan);
  StepResult result(const std::vector<int64_t>& rows);

  void open(LocalStage& stage, Slot& slot);
  void receive(const RunAction& run, LocalStage& stage, Slot& slot);
  void forward(const RunAction& run, LocalStage& stage, Slot& slot);
  void backward(const RunAction& run, LocalStage& stage, Slot& slot);
  void gather_inputs(LocalStage& stage, Slot& slot, int m, Tensors& values, std::vector<bool>& wants);
  void finish_model(int m, const Tensors& outputs, Slot& slot);
  void send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs);
  void send_grads(const RunAction& run, LocalStage& stage, int m, const Tensors& grads);
  void keep_input_grads(const LocalStage& stage, int m, const Tensors& grads);
  void start_of_backward(const LocalStage& stage, const Slot& slot, int m, Tensors& outputs, Tensors& grads) const;
  bool shared_on_this_rank(const ValueSource& source, int m) const;
  void raise_write_to_shared(const ValueSource& source, int stage) const;
  // Raises Error(Numerics) for a value that is not finite, if asked for; `what` gives its name.
  template <typename What>
  void check_finite(const at::Tensor& t, What what) const;
};

}  // namespace plumb
