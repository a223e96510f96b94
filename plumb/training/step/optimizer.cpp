#include "plumb/training/step/optimizer.h"

#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>

#include "plumb/core/text.h"
#include "plumb/scaling/optim.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr const char* kGroupExample = "--group '*.bias: weight_decay=0, lr=0.1x'";

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// Returns the value of "0.1" or "0.1x" (`factor` then); NaN if it is none.
double value_of(std::string text, bool& factor) {
  factor = text.ends_with('x');
  if (factor) text.pop_back();
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && std::isfinite(value) && value >= 0 ? value : NAN;
}

struct OwnRates {
  double lr, weight_decay;
};

OwnRates rates_of(const TrainOptions& o, const std::vector<ParameterGroup>& groups, bool tagged,
                  const std::string& name, const at::Tensor& parameter) {
  OwnRates own{o.lr, o.weight_decay.value_or(o.optimizer == "adamw" && !tagged ? 0.01 : 0)};
  for (const ParameterGroup& group : groups) {
    if (!matches_pattern(group.pattern, name)) continue;
    own.lr = group.lr.value_or(o.lr) * group.lr_factor.value_or(1);
    own.weight_decay = group.weight_decay.value_or(own.weight_decay);
    break;
  }
  if (!tagged || own.lr == 0) return own;
  const optim::ScaledOptions others{.allow_non_unit_scaling_params = true};
  const optim::LrScale scale =
      o.optimizer == "sgd" ? optim::lr_scale_func_sgd(std::nullopt) : optim::lr_scale_func_adam;
  const optim::Rates scaled = optim::scaled_rates(parameter, name, scale, own.lr, own.weight_decay, others);
  return {scaled.lr, scaled.weight_decay};
}

// `shared`: the options but for each parameter's own rates.
template <class Base, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const NamedTensors& parameters, const std::vector<OwnRates>& rates,
                                              const Options& shared) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto own = std::make_unique<Options>(shared);
    own->lr(rates[i].lr);
    own->weight_decay(rates[i].weight_decay);
    groups.emplace_back(std::vector<at::Tensor>{parameters[i].second}, std::move(own));
  }
  return std::make_unique<Base>(std::move(groups), shared);
}

template <class Options>
Options adam_options(const TrainOptions& o) {
  return Options(o.lr).betas({o.beta1, o.beta2}).eps(o.eps);
}

at::Tensor as_real(const at::Tensor& x) {
  return x.defined() && x.is_complex() ? at::view_as_real(x.detach().resolve_conj()) : x;
}

std::vector<ParameterGroup> parse_groups(const TrainOptions& o) {
  std::vector<ParameterGroup> groups;
  for (const std::string& text : o.groups) groups.push_back(parse_group(text));
  return groups;
}

}  // namespace

ParameterGroup parse_group(const std::string& text) {
  const size_t colon = text.rfind(':');
  ParameterGroup group{text, trimmed(text.substr(0, colon)), {}, {}, {}};
  if (colon == std::string::npos || group.pattern.empty()) {
    throw UsageError("--group " + text + ": is no PATTERN: VALUES", kGroupExample);
  }
  for (const std::string& each : split_commas(text.substr(colon + 1))) {
    const std::string part = trimmed(each);
    const size_t equals = part.find('=');
    const std::string key = trimmed(part.substr(0, equals));
    bool factor = false;
    const double value = equals == std::string::npos ? NAN : value_of(trimmed(part.substr(equals + 1)), factor);
    if (std::isnan(value) || (key != "lr" && (key != "weight_decay" || factor))) {
      throw UsageError("--group " + text + ": '" + part + "' is neither lr=NUMBER, lr=NUMBERx nor weight_decay=NUMBER",
                       kGroupExample);
    }
    (key == "weight_decay" ? group.weight_decay : factor ? group.lr_factor : group.lr) = value;
  }
  return group;
}

std::vector<std::vector<std::string>> names_by_group(const TrainOptions& options,
                                                     const std::vector<std::string>& names) {
  const std::vector<ParameterGroup> groups = parse_groups(options);
  std::vector<std::vector<std::string>> fitting(groups.size());
  for (const std::string& name : names) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (!matches_pattern(groups[g].pattern, name)) continue;
      fitting[g].push_back(name);
      break;
    }
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    if (fitting[g].empty()) {
      throw UsageError("--group " + groups[g].text + ": no parameter's name fits '" + groups[g].pattern +
                           "' that fits no group before",
                       names.empty() ? "leave --group out" : "a pattern for names like " + names.front());
    }
  }
  return fitting;
}

Optimizer::Optimizer(const TrainOptions& o, bool tagged, NamedTensors parameters) : parameters_(std::move(parameters)) {
  if (o.nesterov && (o.optimizer != "sgd" || o.momentum == 0)) {
    throw UsageError("--nesterov: is of --optimizer sgd with --momentum", "--optimizer sgd --momentum 0.9 --nesterov");
  }
  const std::vector<ParameterGroup> groups = parse_groups(o);
  std::vector<OwnRates> rates;
  for (const auto& [name, parameter] : parameters_) {
    rates.push_back(rates_of(o, groups, tagged, name, parameter));
    peaks_.push_back(rates.back().lr);
    stepped_.emplace_back(name, parameter.is_complex() ? as_real(parameter).requires_grad_() : parameter);
  }
  if (parameters_.empty()) return;
  using namespace torch::optim;
  if (o.optimizer == "sgd") {
    optimizer_ = make<SGD>(stepped_, rates, SGDOptions(o.lr).momentum(o.momentum).nesterov(o.nesterov));
  } else if (o.optimizer == "adam") {
    optimizer_ = make<Adam>(stepped_, rates, adam_options<AdamOptions>(o));
  } else {
    optimizer_ = make<AdamW>(stepped_, rates, adam_options<AdamWOptions>(o));
  }
}

NamedTensors Optimizer::state(const std::function<bool(const std::string& name)>& of) const {
  if (!optimizer_) return {};
  NamedTensors all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    if (of && !of(name)) continue;
    for (auto& [key, tensor] : optimizer_state(*optimizer_, {stepped_[i]})) {
      const bool part = parameter.is_complex() && tensor.sizes() == stepped_[i].second.sizes();
      all.emplace_back(key, part ? at::view_as_complex(tensor) : tensor);
    }
  }
  return all;
}

void Optimizer::load_state(const std::string& place, const ReadState& read) {
  if (!optimizer_) return;
  load_optimizer_state(*optimizer_, stepped_, place, [&](const std::string& key) { return as_real(read(key)); });
}

void Optimizer::set_rate(double share) {
  for (size_t i = 0; i < peaks_.size(); ++i) optimizer_->param_groups()[i].options().set_lr(peaks_[i] * share);
}

void Optimizer::step() {
  if (!optimizer_) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].second.is_complex()) stepped_[i].second.mutable_grad() = as_real(parameters_[i].second.grad());
  }
  optimizer_->step();
}

double rate_share(const TrainOptions& o, int64_t step) {
  if (step < o.warmup) return static_cast<double>(step) / static_cast<double>(o.warmup);
  if (step <= o.warmup || o.rate == "constant") return 1;
  const auto falling = [&](double t) { return 1 - (1 - o.final_rate) * t; };
  if (o.rate == "wsd") {
    const int64_t decay = std::min(o.steps, o.decay_steps > 0 ? o.decay_steps : std::max<int64_t>(1, o.steps / 5));
    const int64_t done = step - 1 - (o.steps - decay);
    return done <= 0 ? 1 : falling(static_cast<double>(done) / static_cast<double>(decay));
  }
  const double t = static_cast<double>(step - 1 - o.warmup) / static_cast<double>(o.steps - o.warmup);
  if (o.rate == "linear" || t == 0) return falling(t);
  return o.final_rate + (1 - o.final_rate) * (1 + std::cos(M_PI * t)) / 2;
}

}  // namespace plumb
