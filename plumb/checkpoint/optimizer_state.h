// The state of torch's optimizers as tensors by parameters' names.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>

#include "plumb/checkpoint/checkpoint.h"

namespace plumb {

// The tensor of "exp_avg/NAME", the optimizer's from then on; undefined if there is none.
using ReadState = std::function<at::Tensor(const std::string& key)>;
ReadState reader_of(const Checkpoint& checkpoint);

// Returns the state of torch::optim's Adam, AdamW and SGD, and of plumb::optim's optimizers. Names: "step/NAME" (int64,
// no dimension), "exp_avg/NAME", "exp_avg_sq/NAME", "max_exp_avg_sq/NAME", "momentum_buffer/NAME", as far as they
// exist. The tensors are the optimizer's own. Throws Error(Unsupported) for another optimizer.
NamedTensors optimizer_state(const torch::optim::Optimizer& optimizer, const NamedTensors& parameters);

// Reads that state into an optimizer over these parameters, one tensor at a time. A parameter whose state `read` does
// not have is left without one. `place` begins errors: Error(UnknownName) for a state that lacks a part, and
// Error(TensorMismatch) for one of another shape or of another kind of optimizer.
void load_optimizer_state(torch::optim::Optimizer& optimizer, const NamedTensors& parameters, const std::string& place,
                          const ReadState& read);
void load_optimizer_state(torch::optim::Optimizer& optimizer, const NamedTensors& parameters,
                          const Checkpoint& checkpoint);

}  // namespace plumb
