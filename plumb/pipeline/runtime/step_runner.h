// Runs a pipeline's steps: all actions of a rank in order, and the work on gradients at the end.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "plumb/core/str.h"
#include "plumb/pipeline/runtime/action_runner.h"
#include "plumb/pipeline/runtime/replicas.h"
#include "plumb/pipeline/runtime/shared_parameters.h"

namespace plumb {

class StepRunner {
 public:
  // As Pipeline's constructor.
  StepRunner(PipeTable layout, const Schedule& schedule, const std::map<int, std::shared_ptr<StageFunction>>& functions,
             ProcessGroup group, PipelineOptions options);
  StepRunner(const StepRunner&) = delete;

  StepResult run(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets, std::vector<int64_t> rows,
                 bool train, int64_t rows_of_all = 0);
  std::vector<TimelineEvent> gather_timeline();
  at::Tensor gather_loss() const;
  StageRunner& stages() { return runner_; }

 private:
  std::string me() const { return str("rank ", transport_.group().world_rank(setup_.rank)); }
  std::unique_ptr<GradientAccumulator> make_accumulator(int stage, const std::set<int>& shared) const;
  void check_batch(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                   const std::vector<int64_t>& rows) const;
  void begin(bool train, StepBatch batch, int64_t rows_of_all);
  void run_row(const RunPlan& plan);
  std::vector<AgreedValue> agreed_with(const CopyGroup& group) const;
  std::optional<int> other_rank_of(int stage) const;
  std::vector<std::pair<int, at::Tensor*>> buffers_with(int peer, std::map<int, Tensors>& buffers) const;
  void sum_copies(const RunPlan& plan, std::map<int, Tensors>& buffers);
  void finish_gradients(StepResult& done);
  StepResult result();

  Transport transport_;
  StageRunner runner_;
  const PipelineSetup& setup_;
  ActionRunner actions_;
  SharedParameters shared_;
  std::unique_ptr<ReplicaSums> replicas_;  // null: there are no other replicas
  RunPlan train_plan_, eval_plan_;
  at::Tensor loss_;  // loss of the last step, as in StepResult
};

}  // namespace plumb
