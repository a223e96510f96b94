// torch's optimizers with each parameter's own learning rate and weight decay: u-muP's by tags, and those of groups.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/checkpoint/optimizer_state.h"
#include "plumb/training/options.h"

namespace plumb {

// "layers.*.norm*: weight_decay=0, lr=0.1x": what the parameters whose names fit get instead of the options' values.
struct ParameterGroup {
  std::string text, pattern;
  std::optional<double> lr, lr_factor, weight_decay;
};
// Throws UsageError "--group TEXT: ...".
ParameterGroup parse_group(const std::string& text);

// Returns the names that each of options.groups fits first, of all parameters of a model that are trained. Throws
// UsageError for a group that fits none.
std::vector<std::vector<std::string>> names_by_group(const TrainOptions& options,
                                                     const std::vector<std::string>& names);

// torch's AdamW, Adam or SGD. `tagged`: some parameter of the model has a tag (graph/parameter_tag.h); then tagged ones
// get u-muP's learning rates, and weight decay does not depend on the learning rate. A complex parameter is stepped as
// its real and imaginary parts, as Python's optimizers do; LibTorch's Adam would square its gradient as it is.
class Optimizer {
 public:
  // `parameters`: this rank's. With none, every call does nothing.
  Optimizer(const TrainOptions& options, bool tagged, NamedTensors parameters);

  // Sets every parameter's rate as this share of its peak.
  void set_rate(double share);
  void step();

  // Returns the state in the form of checkpoint/optimizer_state.h; `of`: the parameters whose state is wanted.
  NamedTensors state(const std::function<bool(const std::string& name)>& of = {}) const;
  void load_state(const std::string& place, const ReadState& read);

 private:
  NamedTensors parameters_;
  NamedTensors stepped_;  // what the optimizer holds: the parameters, complex ones as real tensors on their memory
  std::vector<double> peaks_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Returns the share of the peak rate at `step` (from 1) of options.steps. With w warm-up steps it is step / w in the
// first w (gradual warm-up, Goyal et al., arXiv 1706.02677, section 2.2), so that step w has the peak. After them, with
// t = (step - 1 - w) / (steps - w), which is 0 at the first step after warm-up and never 1, and f = final_rate:
//   constant  1
//   linear    1 - (1 - f) t
//   cosine    f + (1 - f) (1 + cos(pi t)) / 2      (SGDR, arXiv 1608.03983, equation 5, one cycle)
//   wsd       1, and in the last d steps 1 - (1 - f) (step - 1 - (steps - d)) / d; d: decay_steps, 0: a fifth of steps
//             (warm-up, stable, decay: MiniCPM, arXiv 2404.06395, section 4; the linear decay of arXiv 2405.18392)
// Exactly 1 wherever the rate is the peak.
double rate_share(const TrainOptions& options, int64_t step);

}  // namespace plumb
