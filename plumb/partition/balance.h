// Chooses the cuts of a graph so that the slowest stage is as fast as can be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plumb/partition/cost.h"
#include "plumb/partition/split.h"

namespace plumb {

struct BalanceOptions {
  int stages = 2;
  // Cost of a boundary per stage and microbatch: seconds of latency and a rate. Each stage pays for its inputs and its
  // outputs, forward for the values, backward for their gradients.
  double seconds_per_message = 0;
  double bytes_per_second = 1e10;
  // Bytes a stage may need, with the activations of as many microbatches as it holds in 1F1B; one entry a stage, or one
  // for all; empty: no limit.
  std::vector<int64_t> memory_limits;
  // Bytes of a parameter, its gradient and the optimizer's state, as a multiple of the parameter's bytes (4: AdamW).
  double bytes_per_parameter_byte = 4;
};

struct BalancedStage {
  size_t first_op = 0, num_ops = 0;                     // among the graph's calls
  std::string first_node;                               // name of its first result
  double forward = 0, backward = 0, communication = 0;  // seconds a microbatch
  int64_t parameter_bytes = 0, activation_bytes = 0;    // one copy of the parameters; activations of one microbatch
  int64_t memory = 0;                                   // all together, in bytes
  int64_t bytes_in = 0, bytes_out = 0;                  // over its boundaries, forward
  double seconds() const { return forward + backward + communication; }
};

struct Balance {
  std::vector<BalancedStage> stages;
  double slowest() const;
  double total() const;
  // Returns a table, one stage a line, with each stage's share.
  std::string report() const;
  // Cuts there: options for pipeline().
  SplitOptions options;
};

// Returns places where the graph may be cut, as SplitOptions::cut_before counts them: all of them, or the cheapest to
// cross in each of `most` equally costly stretches. `wanted`: the fewest that do; there may be less.
std::vector<size_t> cut_places(const GraphModule& module, const GraphCost& cost, size_t wanted, size_t most);

// Dynamic programming over the places between neighboring operators, 1,024 of them that are cheap to cross: minimizes
// the slowest stage's forward, backward and communication within the memory limits. Never cuts through memory that is
// written (see split.h), and through values with gaps in their memory (a part of a split) only if there are too few
// other places. Throws Error(Partition) if there are fewer places than cuts, or no cut keeps the limits (says what the
// least is).
Balance balance(const GraphModule& module, const GraphCost& cost, const BalanceOptions& options);

}  // namespace plumb
