// Training in one process: alone, or as a rank of a pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plumb/cli/cut.h"

namespace plumb::cli {

struct TrainOptions {
  std::string file, data, targets, save;
  std::string record, history;  // a file of rules, and the history to write; both or neither
  std::string token_type = "u8", loss = "cross_entropy", optimizer = "adamw", schedule = "1F1B", recompute = "cheap";
  double lr = 1e-3;
  int steps = 100, microbatches = 1, stages = 1, replicas = 1, threads = 0;
  int64_t batch = 0;
  int64_t seed = 0;
  CutOptions cuts;
  std::string timeline;
  int timeline_steps = 1;  // the last ones
  bool json = false;

  int processes() const { return stages * replicas; }
};

// Everything that can be wrong before the first step: throws UsageError or Error.
void check_train(const TrainOptions& options);

// The rank of this process is that of its launcher. `event` gets {"step", "steps", "loss", "seconds"} on the rank that
// holds the last stage, and {"saved"} on rank 0. If weights are to be saved, a first SIGINT (of rank 0) ends training
// with its step. Answers the signal, 0 if there was none.
int train_rank(const TrainOptions& options, const std::function<void(const nlohmann::json&)>& event);

}  // namespace plumb::cli
