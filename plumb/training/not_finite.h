// The place of a step's first NaN or infinity.
#pragma once

#include <string>

#include "plumb/training/job.h"
#include "plumb/training/loss.h"

namespace plumb {

struct NotFinite {
  size_t part = 0;    // of the step's microbatches
  std::string where;  // "the value of %gelu (aten::gelu) at layers.0 (model.py:12): 3 nan, 0 inf of 128"
};

// Runs the model in this process on one microbatch after the other, every value and gradient measured, until one has a
// NaN or an infinity: the first value in the graph's order, else the first gradient of a backward. `where` is empty if
// none is found (dropout draws other masks here).
NotFinite find_not_finite(const TrainOptions& options, const TrainJob& job, const Parts& parts);

// The model as it is, and that microbatch: model.pt2, inputs.pt, targets.pt, step.json.
void dump_step(const TrainOptions& options, const TrainJob& job, const Parts& parts, int64_t step,
               const NotFinite& found, const std::string& what);

}  // namespace plumb
