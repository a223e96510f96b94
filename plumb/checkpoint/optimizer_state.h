// The state of torch's optimisers as tensors by parameters' names.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>

#include "plumb/checkpoint/checkpoint.h"

namespace plumb {

// The tensor of "exp_avg/NAME", the optimiser's from then on; undefined if there is none.
using ReadState = std::function<at::Tensor(const std::string& key)>;
ReadState reader_of(const Checkpoint& checkpoint);

// Of torch::optim's Adam, AdamW and SGD, and those of plumb::optim: "step/NAME" (int64, no dimension), "exp_avg/NAME",
// "exp_avg_sq/NAME", "max_exp_avg_sq/NAME", "momentum_buffer/NAME", those that there are. The tensors are the
// optimiser's own. Raises Error(Unsupported) for another optimiser.
NamedTensors optimizer_state(const torch::optim::Optimizer& optimizer, const NamedTensors& parameters);

// The same state read into an optimiser over these parameters, one tensor at a time. A parameter that `read` has no
// state of has none then. `place` begins errors: Error(UnknownName) for a state that lacks a part, and
// Error(TensorMismatch) for one of another shape or of another kind of optimiser.
void load_optimizer_state(torch::optim::Optimizer& optimizer, const NamedTensors& parameters, const std::string& place,
                          const ReadState& read);
void load_optimizer_state(torch::optim::Optimizer& optimizer, const NamedTensors& parameters,
                          const Checkpoint& checkpoint);

}  // namespace plumb
