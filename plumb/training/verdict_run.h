// A verdict on number formats beside a training: it is measured on the training's own batches and weights, and leaves
// every bit of the training as it is.
#pragma once

#include <optional>

#include "plumb/training/job.h"
#include "plumb/training/step/loss.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb {

// Throws UsageError if --verdict cannot be measured: unknown recipes, a model in several parts.
void check_verdict(const TrainOptions& options, const TrainJob& job);

class VerdictRun {
 public:
  // The job must outlive it.
  VerdictRun(const TrainOptions& options, const TrainJob& job, at::Device device);

  // Takes part in a step before it is computed; `step` counts from 1, the first of this run. After the last measured
  // step, or the training's last, returns the verdict. Where a step's gradient is zero or not finite, the next step
  // is measured in its place.
  std::optional<VerdictReport> step(int64_t step, bool last, const Parts& parts);
  // Returns why there is no verdict: no step could be measured, or no recipe.
  const std::string& problem() const { return problem_; }

 private:
  Verdict::Parts losses(const Parts& parts) const;

  const TrainJob& job_;
  const at::Device device_;
  std::vector<int64_t> steps_;     // that are still to come
  std::optional<Parts> measured_;  // the last one
  std::string problem_;
  Verdict verdict_;
};

}  // namespace plumb
