#include "plumb/pipeline/runtime/runtime.h"

#include <algorithm>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/runtime/step_runner.h"

namespace plumb {

void check_gradient_groups(int groups, int replicas, const Schedule& schedule) {
  if (groups == 0 || groups == replicas) return;
  const auto refuse = [&](const std::string& why, const std::string& remedy) {
    throw Error(ErrorKind::InvalidArgument, str("gradient_groups is ", groups, ", but ", why), "", remedy);
  };
  if (groups < 0 || groups % replicas != 0)
    refuse(str("there are ", replicas, " replicas"), "a number of groups that replicas divide");
  // With another number the tree over groups is not one of replicas' trees.
  const int here = groups / replicas;
  if (replicas > 1 && (here & (here - 1)) != 0)
    refuse(str("each of ", replicas, " replicas would have ", here),
           "1, 2, 4, 8, ... groups a replica, or one replica");
  if (schedule.num_microbatches % here != 0)
    refuse(str("each replica has ", schedule.num_microbatches, " microbatches"),
           "a number of groups that all microbatches divide by");
  for (int m = 1; m < schedule.num_microbatches; m++) {
    for (int stage = 0; stage < schedule.num_stages(); stage++) {
      if (schedule.placement.rank_of(stage, m) != schedule.placement.rank_of(stage, 0))
        refuse("'" + schedule.name + "' runs stages on two ranks, which sum their shares at the end",
               "another schedule, or one group a replica");
    }
  }
}

Pipeline::Pipeline(PipeTable layout, Schedule schedule, std::map<int, std::shared_ptr<StageFunction>> stages,
                   ProcessGroup group, PipelineOptions options)
    : runner_(std::make_unique<StepRunner>(std::move(layout), schedule, stages, std::move(group), std::move(options))) {
}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

StepRunner& Pipeline::runner() const {
  if (!runner_)
    throw Error(ErrorKind::InvalidState, "this pipeline was moved into another one", "", "use the one it was moved to");
  return *runner_;
}

namespace {

bool any_defined(const Tensors& tensors) {
  return std::ranges::any_of(tensors, [](const auto& t) { return t.defined(); });
}

StepResult run_batch(StepRunner& runner, const Tensors& inputs, const Tensors& targets, bool train) {
  const PipelineSetup& setup = runner.stages().setup;
  const int num = setup.schedule.num_microbatches;
  Microbatches in, out;
  if (any_defined(inputs)) in = split_batch(inputs, setup.options.input_chunks, num);
  if (any_defined(targets)) out = split_batch(targets, setup.options.target_chunks, num);
  const auto in_rows = std::reduce(in.rows.begin(), in.rows.end());
  const auto out_rows = std::reduce(out.rows.begin(), out.rows.end());
  if (in_rows > 0 && out_rows > 0 && in_rows != out_rows && (in_rows % num != 0 || out_rows % num != 0)) {
    throw Error(ErrorKind::TensorMismatch,
                str("targets of ", out_rows, " rows are not cut into ", num, " microbatches beside inputs of ", in_rows,
                    " rows"),
                "", "as many rows in both, or TensorChunkSpec::whole() for what every microbatch gets whole");
  }
  // The loss is over the targets.
  return runner.run(in.inputs, out.inputs, out.rows.empty() ? in.rows : out.rows, train);
}

}  // namespace

StepResult Pipeline::step(const Tensors& inputs, const Tensors& targets) {
  return run_batch(runner(), inputs, targets, true);
}

StepResult Pipeline::eval(const Tensors& inputs, const Tensors& targets) {
  return run_batch(runner(), inputs, targets, false);
}

StepResult Pipeline::step_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows, int64_t rows_of_all) {
  return runner().run(inputs, targets, rows, true, rows_of_all);
}

StepResult Pipeline::eval_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows) {
  return runner().run(inputs, targets, rows, false);
}

std::vector<TimelineEvent> Pipeline::gather_timeline() { return runner().gather_timeline(); }
at::Tensor Pipeline::gather_loss() { return runner().gather_loss(); }

const RecomputeReport& Pipeline::recomputed(int stage) const {
  const auto& stages = runner().stages().stages;
  const auto it = stages.find(stage);
  if (it == stages.end()) {
    throw Error(ErrorKind::InvalidArgument, str("rank ", rank(), " has no stage ", stage));
  }
  return it->second.recomputed;
}

const Schedule& Pipeline::schedule() const { return runner().stages().setup.schedule; }
int Pipeline::rank() const { return runner().stages().setup.rank; }
void Pipeline::set_step(std::int64_t number, std::vector<std::int64_t> rows) {
  const auto wanted = static_cast<size_t>(schedule().num_microbatches) + 1;
  if (!rows.empty() && (rows.size() != wanted || !std::ranges::is_sorted(rows))) {
    throw Error(ErrorKind::InvalidArgument, str("set_step() takes where each of ", wanted - 1,
                                                " microbatches begins, in order, and where the last one ends"));
  }
  runner().stages().step_number = number;
  runner().stages().first_rows = std::move(rows);
}
StepDriver Pipeline::driver() { return StepDriver(runner().stages()); }

}  // namespace plumb
