// Runs a rank's part of a schedule: its stages' forwards and backwards over microbatches, and the messages between.
//
// The arithmetic does not depend on the schedule or on how stages are spread over ranks. Gradients are accumulated in
// the order of microbatches. The gradient of a value with several users is summed in autograd's order. Gradients of
// tied parameters are summed copy by copy, then over the copies from the last stage to the first. So losses and
// gradients are bit for bit those of the same microbatches accumulated by one process: for untied models by plain
// backward(), for tied ones by this runtime with all stages in one process. (Two-way tables, where a stage lives on two
// ranks, sum the two ranks' shares at the end and are equal from run to run.)
//
// A stage's forwards run in the order of the table, so buffers (batch norm) are updated once per microbatch. Each of
// several groups of microbatches (PipelineOptions::gradient_groups; replicas are such) begins with the buffers from
// before the step, which then are the mean over the groups (stage_runner.h).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/pipeline/runtime/microbatch.h"
#include "plumb/pipeline/runtime/stage.h"
#include "plumb/pipeline/runtime/step_driver.h"
#include "plumb/pipeline/runtime/timeline.h"
#include "plumb/pipeline/transport/process_group.h"
#include "plumb/schedule/schedule.h"

namespace plumb {

// A microbatch's loss from the model's outputs and the microbatch's targets: one number.
using Loss = std::function<at::Tensor(const Tensors& outputs, const Tensors& targets)>;

struct PipelineOptions {
  // None: the model's outputs already hold the loss, as `loss_output`.
  Loss loss;
  int loss_output = 0;
  // How inputs and targets of step() and eval() are cut, and outputs merged.
  std::vector<TensorChunkSpec> input_chunks, target_chunks;
  std::vector<OutputMerge> output_merges;
  // The loss of the batch is the mean over its rows: every microbatch's loss counts by its rows, and gradients are
  // divided by the number of microbatches at the end of a step. Gradients that were there before the step are kept and
  // added to. Off: gradients are the sum over microbatches.
  bool scale_grads = true;
  bool scale_input_grads = true;  // StepResult::input_grads, too; false: sums, as torch.distributed.pipelining has them
  bool return_outputs = true;     // step() keeps the outputs of all microbatches and merges them
  bool record_timeline = false;
  // Called after each of this rank's actions of a step: how many are done, of how many.
  std::function<void(size_t done, size_t total)> progress;
  bool check_numerics = false;  // throw Error(Numerics) at the first NaN or infinity that leaves a stage
  // Called with a parameter's name if a sum of its gradients is not what it was after the microbatch before: memory is
  // damaged. Such sums are hashed twice a microbatch then. None: they are not.
  std::function<void(const std::string& parameter)> gradient_changed;
  // Seeds the generators of the CPU and of the stages' devices for each forward, so that dropout does not depend on the
  // schedule. Every random node of a stage's graph has a seed from this number, the step, the node's name and the
  // microbatch's place in the batch of all replicas. So it does not depend on cut and replicas either
  // (graph/node_seeds.h; set_step()). A stage that is no graph takes its number in place of the node's name. Their own
  // state is put back after the step.
  std::optional<std::uint64_t> seed;
  // Ranks of other pipelines that hold the same stages as this one and train on other rows of the batch (replicas.h);
  // this rank's place among them is its replica's number. All replicas run the same schedule. Gradients are summed over
  // them in that order; with scale_grads they are those of the mean over all their rows.
  ProcessGroup replicas;
  // Number of groups of consecutive microbatches in a step, those of all replicas. A group's gradients are summed in
  // order, the groups' sums in a binary tree: (0 + 1) + (2 + 3). Equal groups give the same bits for every number of
  // replicas, losses too, if all microbatches have the same rows, or the rows of all replicas are known
  // (step_microbatches()): one replica, or any number that leaves each 1, 2, 4, 8, ... groups. 0: as many as there are
  // replicas. A rank keeps log2 of its groups sums of a parameter; all of them of a tied one. Several groups a replica
  // are not for tables that run a stage on two ranks.
  int gradient_groups = 0;
  // Gradients are the mean over replicas, whatever their rows.
  bool average_replicas = false;
  // Formats between stages, for a layout that says none (a pipe's says its own): of every floating-point value, and of
  // its gradient. The same on all ranks.
  WireFormats wire;
  // Functions in the place of this rank's actions (step_driver.h). Other ranks need not have the same.
  ActionHooks hooks;
};

// Throws Error(InvalidArgument) if this number of PipelineOptions::gradient_groups cannot be spread over the replicas
// that each run the schedule.
void check_gradient_groups(int groups, int replicas, const Schedule& schedule);

struct StepResult {
  // Losses of the microbatches whose last stage ran on this rank, in their order, detached. Two-way tables run some of
  // them on each of two ranks.
  Tensors losses;
  at::Tensor loss;  // their mean by rows, where all are here (gather_loss()); of a training step: over all replicas
  Tensors outputs;  // merged
  std::vector<TimelineEvent> timeline;  // events of this rank
  // By microbatch and input of the model, for inputs that require a gradient: its gradient, divided as the parameters'
  // are, on the rank whose stage uses it (a share on each, if several ranks do). Empty if there is none.
  std::vector<Tensors> input_grads;
};

class StepRunner;

class Pipeline {
 public:
  // `stages`: the stages this rank holds in the schedule's placement, no more and no fewer. The schedule is taken
  // without idle entries and messages (which follow from the layout). Blocks until all ranks have come and agree on
  // layout, schedule and tied parameters. Throws Error(Schedule) if the table cannot run, Error(InvalidArgument) if
  // stages, placement and group do not fit, Error(Communication).
  Pipeline(PipeTable layout, Schedule schedule, std::map<int, std::shared_ptr<StageFunction>> stages,
           ProcessGroup group = {}, PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Trains on one batch: accumulates into the parameters' `.grad`. `inputs`: the model's; those that no stage of this
  // rank uses may be undefined, and the list may be empty on a rank that uses none. `targets`: for the loss, on ranks
  // that hold the last stage. Throws a stage's error as Error with rank and action; every other rank throws
  // Error(Communication) that names this rank and repeats its text. Throws what split_batch() throws, and
  // Error(TensorMismatch) for targets whose rows do not lie in the microbatches of the inputs'.
  StepResult step(const Tensors& inputs, const Tensors& targets = {});
  // step() on a batch that is cut already; `rows` weighs the losses (empty: all alike). `rows_of_all`: of all replicas,
  // where it is known beforehand: each microbatch then weighs by its share of all, and gradients have the same bits for
  // every number of replicas. 0: a replica weighs by its own rows, and the sum over replicas by theirs.
  StepResult step_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets = {},
                               const std::vector<int64_t>& rows = {}, int64_t rows_of_all = 0);
  // Forwards only, without autograd. Losses where targets are given.
  StepResult eval(const Tensors& inputs, const Tensors& targets = {});
  StepResult eval_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets = {},
                               const std::vector<int64_t>& rows = {});

  // Returns the time lines of the last step of all ranks, on every rank. All ranks must call it.
  std::vector<TimelineEvent> gather_timeline();

  // Returns the loss of the last step's batch: the mean by rows over all microbatches, and of a training step over all
  // replicas. On the rank that has the last stage of microbatch 0; undefined elsewhere, and after a step without
  // losses. If every stage is on two ranks, StepResult::loss is undefined and only this function has the loss. All
  // ranks must call it.
  at::Tensor gather_loss();

  // Sets the number of the next step, for PipelineOptions::seed: 0 at first, and one more with every step and
  // evaluation. `rows`: where each microbatch of this replica begins in that step's batch of all, and where the last
  // one ends: dropout then draws the same numbers for a row however the batch is cut. Throws Error(InvalidArgument) for
  // another number of them.
  void set_step(std::int64_t number, std::vector<std::int64_t> rows = {});

  // Returns the results that a stage of this rank did not keep in its last forward, one microbatch's; empty before the
  // first training step. Throws Error(InvalidArgument) for a stage of another rank.
  const RecomputeReport& recomputed(int stage) const;

  const Schedule& schedule() const;
  int rank() const;

  // Returns the driver of the running step, for hooks. It must not outlive the pipeline.
  StepDriver driver();

 private:
  // Throws Error(InvalidState) for a pipeline that was moved from.
  StepRunner& runner() const;
  std::unique_ptr<StepRunner> runner_;
};

}  // namespace plumb
