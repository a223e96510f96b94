#include "plumb/scaling/optim.h"

#include <cmath>
#include <sstream>

#include "plumb/core/error.h"

namespace plumb::optim {
namespace {

double fan_in(const ParameterData& data, at::IntArrayRef sizes) {
  return static_cast<double>(data.fan_in.value_or(shape_fan_in(sizes)));
}

// std::pow has the bits of Python's `x ** power`, which 1 / std::sqrt(x) has not.
double to_power(double x, double power) { return std::pow(x, power); }

}  // namespace

double lr_scale_for_depth(const ParameterData& data) {
  return data.scaling_depth ? to_power(static_cast<double>(*data.scaling_depth), -0.5) : 1;
}

double lr_scale_func_adam(const ParameterData& data, at::IntArrayRef sizes) {
  const double scale = lr_scale_for_depth(data);
  return data.type == MupType::Weight ? scale * to_power(fan_in(data, sizes), -0.5) : scale;
}

LrScale lr_scale_func_sgd(const std::optional<std::string>& readout_constraint) {
  if (!readout_constraint) return lr_scale_func_adam;
  if (*readout_constraint != "to_output_scale") {
    throw Error(ErrorKind::InvalidArgument,
                "SGD has no learning-rate rule for a readout with constraint '" + *readout_constraint + "'.", "",
                "no constraint or to_output_scale");
  }
  return [](const ParameterData& data, at::IntArrayRef sizes) {
    const double scale = lr_scale_for_depth(data);
    switch (data.type) {
      case MupType::Weight: return scale * to_power(fan_in(data, sizes), 0.5);
      case MupType::Bias:
      case MupType::Norm: return sizes.empty() ? scale : scale * static_cast<double>(sizes[0]);
      case MupType::Output: return scale;
    }
    return scale;
  };
}

Rates scaled_rates(const at::Tensor& parameter, const std::string& name, const LrScale& lr_scale, double lr,
                   double weight_decay, const ScaledOptions& options) {
  if (auto data = parameter_data(parameter)) {
    lr *= lr_scale(*data, parameter.sizes());
  } else if (!options.allow_non_unit_scaling_params) {
    std::ostringstream text;
    text << "Parameter " << name << ", shape " << parameter.sizes() << ", has no u-muP type.";
    throw Error(ErrorKind::InvalidState, text.str(), "",
                "plumb::tag(parameter, {type}), or allow_non_unit_scaling_params");
  }
  if (options.independent_weight_decay && weight_decay != 0) {
    if (lr == 0) {
      throw Error(ErrorKind::InvalidArgument, "Independent weight decay needs a learning rate other than 0.");
    }
    weight_decay /= lr;
  }
  return {lr, weight_decay};
}

NamedParameters with_names(const std::vector<at::Tensor>& parameters) {
  NamedParameters named;
  for (size_t i = 0; i < parameters.size(); ++i) named.emplace_back(std::to_string(i), parameters[i]);
  return named;
}

const NamedParameters& none_complex(const NamedParameters& parameters) {
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.is_complex()) continue;
    throw Error(ErrorKind::Unsupported, "Parameter " + name + " is complex, which LibTorch's Adam is not made for.", "",
                "a real parameter of its two parts and at::view_as_complex in the forward, or SGD");
  }
  return parameters;
}

}  // namespace plumb::optim
