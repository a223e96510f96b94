// A training's cost before it is started: memory, time, and the tensors that each rank holds.
#pragma once

#include <string>

#include "plumb/training/job.h"

namespace plumb {

// Runs every stage of the job on one microbatch, in this process, and simulates the schedule. Throws a stage's errors.
TrainNeeds measure_needs(const TrainOptions& options, const TrainJob& job);

// Returns a table, and a sentence before it.
std::string to_text(const TrainNeeds& needs, const TrainOptions& options);

}  // namespace plumb
