// A rank's part of a training's steps: its stages, their gradients and the optimizer.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "plumb/training/job.h"
#include "plumb/training/ranks.h"
#include "plumb/training/step/gradients.h"
#include "plumb/training/step/loss.h"
#include "plumb/training/step/optimizer.h"

namespace plumb {

class TrainStep {
 public:
  // All must outlive it.
  TrainStep(const TrainOptions& options, TrainJob& job, const TrainRanks& ranks);

  // Makes the pipeline, which compares copies of parameters: every rank's state must be there.
  void connect();

  struct Numbers {
    double loss = 0, norm = 0;
    double memory = 0;            // bytes of this pipeline's largest rank
    std::vector<double> squares;  // squares of the gradients' norms, by job.trained
  };
  // Leaves the step's gradients in the parameters. All ranks call it.
  // `before_sharing` is called when the gradients are there, before another rank learns of it.
  Numbers compute(int64_t step, const Parts& parts, const std::function<void()>& before_sharing = {});
  // Clips the gradients and changes the weights.
  void update(const Numbers& numbers);

  const std::map<int, std::shared_ptr<StageFunction>>& stages() const { return stages_; }
  const NamedTensors& parameters() const { return parameters_; }
  Optimizer& optimizer() { return *optimizer_; }
  Pipeline& pipeline() { return *pipeline_; }
  // Returns whether this rank computes the loss.
  bool has_loss() const { return owners_.back() == ranks_.rank(); }

 private:
  void run_pass(int64_t step, const Parts& parts, int64_t pass, Numbers& numbers);
  void share(Numbers& numbers);

  const TrainOptions& o_;
  TrainJob& job_;
  const TrainRanks& ranks_;
  std::map<int, std::shared_ptr<StageFunction>> stages_;
  NamedTensors parameters_;           // that this rank trains, each tensor once, by their first names in the model
  std::vector<at::Tensor> measured_;  // tensors of job.trained that this rank owns; undefined for those of others
  std::vector<int> owners_;           // owning ranks: of each of job.trained, then each rank, then that of the loss
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<PassSum> passes_;  // null: one pass a step
  std::unique_ptr<Pipeline> pipeline_;
};

}  // namespace plumb
