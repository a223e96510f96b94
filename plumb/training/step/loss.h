// The loss of a microbatch, and how many targets it is the mean of.
#pragma once

#include "plumb/graph/graph_module.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/training/data/samples.h"

namespace plumb {

// Returns the mean over the targets that count: for cross_entropy those that are not the ignored one, for mse those of
// the mask. 0, with gradients of 0, where none counts. With --loss output the model's own: the output named so, or the
// only floating-point number; throws UsageError if it returns none.
Loss make_loss(const TrainOptions& options, const GraphModule& module);

// Returns --loss of the model's outputs with targets made up, to measure with; none for "none". "": the model's own
// loss if it returns one, else cross_entropy for floating-point outputs of two or more dimensions. Throws UsageError.
std::function<at::Tensor(const Tensors& outputs)> example_loss(const std::string& loss, const GraphModule& module);

// A step's batch in parts, rows of each as equal as can be, the first ones one longer. `counts`: the targets that
// count, by part; with --loss output the rows.
struct Parts {
  std::vector<Tensors> inputs, targets;
  std::vector<int64_t> counts;
  std::vector<int64_t> first_rows;  // in the batch, by part and, last, its end
  int64_t total() const;
  int64_t tokens() const;  // numbers of the first input, where that is rows of whole numbers; else 0
};
Parts cut_batch(const TrainOptions& options, const Batch& batch, int64_t parts);

}  // namespace plumb
