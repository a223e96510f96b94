// Optimizers with u-muP's learning rates, so that one rate serves every width and depth (arXiv 2407.17465, table 2).
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plumb/tensors/parameter_tag.h"

namespace plumb::optim {

// The factor on the learning rate of a parameter of this tag and shape.
using LrScale = std::function<double(const ParameterData& data, at::IntArrayRef sizes)>;

// 1 / sqrt(depth) inside a stack of layers, else 1.
double lr_scale_for_depth(const ParameterData& data);
// For updates that do not depend on the gradient's size: weights by 1 / sqrt(fan-in).
double lr_scale_func_adam(const ParameterData& data, at::IntArrayRef sizes);
// The readout's constraint: none (gradients have unit scale, Adam's rule holds) or "to_output_scale".
LrScale lr_scale_func_sgd(const std::optional<std::string>& readout_constraint);

struct ScaledOptions {
  // A step decays weights by weight_decay itself, whatever the learning rate is at its peak.
  bool independent_weight_decay = true;
  // Let untagged parameters pass, unscaled, instead of an Error.
  bool allow_non_unit_scaling_params = false;
};

// The learning rate and weight decay of one parameter. `name` is for the error an untagged one raises.
struct Rates {
  double lr, weight_decay;
};
Rates scaled_rates(const at::Tensor& parameter, const std::string& name, const LrScale& lr_scale, double lr,
                   double weight_decay, const ScaledOptions& options);

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;
NamedParameters with_names(const std::vector<at::Tensor>& parameters);
// Returns the parameters. Throws Error(Unsupported) for a complex one: LibTorch's Adam squares its gradient as it is,
// where Python's steps its real and imaginary parts.
const NamedParameters& none_complex(const NamedParameters& parameters);

// One parameter group for each parameter, with its own rates. A tensor under several names is one parameter:
// parameters() of torch::nn::Module lists a tied tensor once for each. OptimizerOptions: torch::optim::AdamOptions and
// the like.
template <class OptimizerOptions>
std::vector<torch::optim::OptimizerParamGroup> scaled_parameters(const NamedParameters& parameters,
                                                                 const LrScale& lr_scale,
                                                                 const OptimizerOptions& defaults,
                                                                 const ScaledOptions& options = {}) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  std::set<const at::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const auto rates = scaled_rates(parameter, name, lr_scale, defaults.lr(), defaults.weight_decay(), options);
    auto own = std::make_unique<OptimizerOptions>(defaults);
    own->lr(rates.lr);
    own->weight_decay(rates.weight_decay);
    groups.emplace_back(std::vector<at::Tensor>{parameter}, std::move(own));
  }
  return groups;
}

// torch's optimizer over scaled parameter groups. Give it a module's parameters, named or not.
template <class Base, class OptimizerOptions>
class ScaledOptimizer : public Base {
 public:
  ScaledOptimizer(const NamedParameters& parameters, const LrScale& lr_scale, const OptimizerOptions& defaults,
                  const ScaledOptions& options)
      : Base(scaled_parameters(parameters, lr_scale, defaults, options), defaults) {}
};

template <class Base, class OptimizerOptions>
class ScaledAdam : public ScaledOptimizer<Base, OptimizerOptions> {
 public:
  explicit ScaledAdam(const NamedParameters& parameters, const OptimizerOptions& defaults = {},
                      const ScaledOptions& options = {})
      : ScaledOptimizer<Base, OptimizerOptions>(none_complex(parameters), lr_scale_func_adam, defaults, options) {}
  explicit ScaledAdam(const std::vector<at::Tensor>& parameters, const OptimizerOptions& defaults = {},
                      const ScaledOptions& options = {})
      : ScaledAdam(with_names(parameters), defaults, options) {}
};
using Adam = ScaledAdam<torch::optim::Adam, torch::optim::AdamOptions>;
using AdamW = ScaledAdam<torch::optim::AdamW, torch::optim::AdamWOptions>;

class SGD : public ScaledOptimizer<torch::optim::SGD, torch::optim::SGDOptions> {
 public:
  SGD(const NamedParameters& parameters, const torch::optim::SGDOptions& defaults,
      const std::optional<std::string>& readout_constraint = std::nullopt, const ScaledOptions& options = {})
      : ScaledOptimizer(parameters, lr_scale_func_sgd(readout_constraint), defaults, options) {}
  SGD(const std::vector<at::Tensor>& parameters, const torch::optim::SGDOptions& defaults,
      const std::optional<std::string>& readout_constraint = std::nullopt, const ScaledOptions& options = {})
      : SGD(with_names(parameters), defaults, readout_constraint, options) {}
};

}  // namespace plumb::optim
