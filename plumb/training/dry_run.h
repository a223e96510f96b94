// A training's cost before it is started: memory, time, and the tensors that each rank holds.
#pragma once

#include <string>
#include <vector>

#include "plumb/training/job.h"

namespace plumb {

struct RankNeeds {
  std::vector<int> stages;
  int64_t parameters = 0;  // elements, of its stages
  double resident = 0;     // bytes of parameters, gradients and the optimizer's state
  double peak = 0;         // and of activations, at most
};

struct TrainNeeds {
  std::string schedule;
  double seconds = 0;  // of a step: the schedule simulated with the stages' measured times, so often as it accumulates
  double bubble = 0;   // the ranks' idle share of it
  int64_t rows = 0;    // of a step
  std::vector<RankNeeds> ranks;  // of one pipeline
};

// Runs every stage of the job on one microbatch, in this process, and the schedule in simulation. Throws what a stage
// throws.
TrainNeeds measure_needs(const TrainOptions& options, const TrainJob& job);

// Returns the JSON that the help of --json describes.
nlohmann::json to_json(const TrainNeeds& needs);
// Returns a table, and a sentence before it.
std::string to_text(const TrainNeeds& needs, const TrainOptions& options);

}  // namespace plumb
