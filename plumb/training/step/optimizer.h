// torch's optimizers with each parameter's own learning rate and weight decay: u-muP's by tags, and those of groups.
#pragma once

#include <torch/optim/optimizer.h>

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
// get u-muP's learning rates, and weight decay does not depend on the learning rate.
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
  std::vector<double> peaks_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace plumb
