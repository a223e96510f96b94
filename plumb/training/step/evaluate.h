// The loss on held-out data.
#pragma once

#include <memory>

#include "plumb/pipeline/transport/process_group.h"
#include "plumb/training/job.h"

namespace plumb {

// Returns a copy of the graph in which dropout and the like draw nothing and batch norm takes its running statistics;
// the tensors are those of `module`, and a run writes to none of them. torch's module.eval(), for a graph. Throws
// Error(InvalidState) for a graph that was made in training mode of a forward that takes another path in evaluation.
std::shared_ptr<GraphModule> evaluation_graph(const GraphModule& module);

struct Evaluation {
  double loss = 0;      // the mean over all targets that count
  int64_t targets = 0;  // how many these were
};

// Runs the samples in order, each pipeline its share of the batches. Losses are taken by microbatch and summed in their
// order, in double, so the result does not depend on stages, schedule and the number of pipelines. Rows that do not
// count fill a last microbatch that is not full; with --loss output, where that is impossible, it is dropped.
class Evaluator {
 public:
  // Made by all ranks of `world`, which also call run().
  Evaluator(const TrainOptions& options, const TrainJob& job, Samples& samples, const ProcessGroup& world,
            const ReplicatedGroups& groups);
  // Runs the evaluation; parameters, buffers and the generator stay as they are. Throws UsageError if the data has no
  // full microbatch (with --loss output) or no target that counts.
  Evaluation run();

 private:
  Batch unit(int64_t number) const;

  const TrainOptions& options_;
  const TrainJob& job_;
  Samples& samples_;
  ProcessGroup world_;
  ReplicatedGroups groups_;
  std::unique_ptr<Pipeline> pipeline_;
  int64_t rows_ = 0, units_ = 0;  // rows of a microbatch, microbatches
};

// Evaluates options.file on options.data, in this process. Throws UsageError or Error.
Evaluation evaluate_file(TrainOptions options, const std::function<void(const std::string& what)>& phase = {});

}  // namespace plumb
