// The training data of `plumb train`.
#pragma once

#include <memory>
#include <vector>

#include "plumb/cli/train_rank.h"
#include "plumb/graph/graph_module.h"

namespace plumb::cli {

struct Batch {
  std::vector<at::Tensor> inputs, targets;
};

class Samples {
 public:
  virtual ~Samples() = default;
  // Every rank gets the same batches for the same seed.
  virtual Batch draw() = 0;
};

// Raw tokens: windows of the input's length and the same windows one token on, as targets or as the model's second
// input (--loss output). Tensor files: rows drawn with repetition. Throws UsageError.
std::unique_ptr<Samples> open_samples(const TrainOptions& options, const GraphModule& module, int64_t batch);

// Rows of a step: --batch, or the file's batch times the microbatches. Throws UsageError if the file's batch is fixed
// and does not fit.
int64_t rows_of_step(const TrainOptions& options, const GraphModule& module);

}  // namespace plumb::cli
