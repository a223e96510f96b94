// The costs of a cut graph's stages, measured by running them, for the comparison of schedules.
#pragma once

#include <functional>
#include <vector>

#include "plumb/partition/cost.h"
#include "plumb/partition/pipe.h"
#include "plumb/pipeline/runtime/stage.h"
#include "plumb/schedule/compare.h"

namespace plumb {

struct StageCostOptions {
  int repeats = 16;    // runs, of which four are in flight at a time; the mean without the longest eighth counts
  int busy_ranks = 1;  // so many cores are at work meanwhile, as in a run: memory and clock are shared
  // The loss, of the model's outputs; none: the gradients of all outputs are ones.
  std::function<at::Tensor(const Tensors& outputs)> loss = {};
  std::vector<Recompute> recompute = {};  // by stage; empty: cheap
  // Cost of a message between ranks: seconds, and bytes in a second.
  double seconds_per_message = 5e-5;
  double bytes_per_second = 2e9;
  // Bytes of a parameter, its gradient and the optimizer's state, as a multiple of the parameter's bytes (4: AdamW).
  double bytes_per_parameter_byte = 4;
  Machine machine = {};  // for estimates
};

// Returns seconds and bytes of one microbatch, stage by stage. `inputs`: the whole graph's, flat. Four microbatches go
// through all stages, forwards, then backwards, whole or input halves and later weight halves, and add to the
// gradients, as in a step: a stage that runs again and again by itself finds its values in caches and takes up to a
// third less. Seconds are processor time of the thread that runs a stage, so that another load on the machine does not
// count; on a device that is no CPU they are the clock's. Activations are what a stage holds from its forward to its
// backward; Costs::held_for_weight is the share of it that a stage holds after the input half. State, gradients and the
// random generator are left as they were. Throws what a stage throws.
StageCosts measure_stages(const Pipe& pipe, const std::vector<c10::IValue>& inputs,
                          const StageCostOptions& options = {});

// Estimates these costs from shapes alone (estimate_cost), both halves of a backward alike.
StageCosts estimate_stages(const Pipe& pipe, const StageCostOptions& options = {});

// Returns inputs to measure with, of the sizes and types the graph was made for: random numbers, zeros for integers.
// Throws Error(InvalidArgument) for an input whose sizes are not known.
std::vector<c10::IValue> example_inputs(const GraphModule& module);

}  // namespace plumb
