// Searches a pipeline's cut, placement, order, halves and recomputation together.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "plumb/schedule/compare.h"

namespace plumb {

// Costs of a model's pieces in the order in which they run; between any two of them a cut may be. All lists are by
// piece, in one unit of time and one of memory.
struct PieceCosts {
  // Costs under one way of keeping what the backward needs.
  struct Way {
    std::string recompute;  // "cheap", "none"
    std::vector<double> forward, input, weight, full, activation;
    std::vector<double> held = {};  // memory after the input half, until the weight half; empty: as activation
    Costs::Working working = {{}, {}, {}, {}, {}, {}};  // empty: none
  };
  std::vector<Way> ways;              // at least one
  std::vector<double> resident;       // memory that a piece takes whatever the schedule
  std::vector<double> gradient = {};  // memory of its gradients; empty: none
  // A value that later pieces use: where it is made, its last user, the time that sending it takes, and its memory.
  struct Value {
    int from = 0, last = 0;
    double seconds = 0, bytes = 0;
  };
  std::vector<Value> values;
  double latency = 0;             // time of a message whatever its size
  double seconds_per_copied = 0;  // time that each end of a message works on a unit of memory

  int size() const { return static_cast<int>(resident.size()); }
};

// A stage is the pieces from its entry of `begins` (the first is 0) to the next stage's.
struct PieceStages {
  std::vector<int> begins, ways;  // by stage; `ways` are indices into PieceCosts::ways
};

// Returns the costs of such stages: sums over their pieces. Throws Error(InvalidArgument) for lists that do not fit.
StageCosts costs_of_stages(const PieceCosts& pieces, const PieceStages& stages);

// Returns the stages whose slowest is as fast as can be. Throws Error(InvalidArgument) for more stages than pieces.
PieceStages balanced_stages(const PieceCosts& pieces, int num_stages);

struct JointOptions {
  // Memory of a rank, resident and activations together. Infinite: what the best named schedule takes.
  double memory_limit = std::numeric_limits<double>::infinity();
  std::vector<int> stages_per_rank = {1, 2, 3};
  // Names of the schedules to start from, of which bidirectional ones are left out; empty: all others.
  std::vector<std::string> names;
  // The most tables that are compared: half a minute for 16 ranks. The same number gives the same plan, whatever the
  // machine.
  int tables = 300000;
};

struct JointResult {
  PieceStages stages;
  Schedule schedule;
  StageCosts costs;  // costs of `stages`
  Simulation simulation;
  std::vector<double> memory;  // by rank: resident and activations
  ScheduleChoice named;        // the quickest named schedule within the limit, on its balanced cut
  // Time of a step as a share of `named`'s: with the costs, with links four times as slow, and with costs that are off
  // by up to a tenth. None is above 1.
  std::vector<double> shares;
};

// A fast list scheduler under simulated annealing, started from every named schedule on balanced cuts; then neighbors
// in the best table's rows swap. Minimizes the largest of JointResult::shares. The plan keeps the memory limit, and is
// never slower than the best named schedule. Weight gradients add up in microbatch order.
//
// Throws Error(InvalidArgument) for costs that do not fit each other, counts below one, and if no named schedule keeps
// the limit (says what the least is).
JointResult joint_search(int num_ranks, int num_microbatches, const PieceCosts& pieces,
                         const JointOptions& options = {});

}  // namespace plumb
