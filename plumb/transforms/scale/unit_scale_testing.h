// For tests of unit_scale: texts of graphs before and after.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb::testing_unit_scale {

using namespace testing_models;

// Returns the graph after the pass, for a text; `state` holds what its get_attr nodes name.
inline std::string after_scaling(const std::string& text, State state = {}, const UnitScaleOptions& options = {},
                                 Report* report = nullptr) {
  auto module = module_of(text, std::move(state));
  unit_scale(*module, options, report);
  module->lint();
  return to_string(module->graph());
}

// Returns the root of the mean square.
inline double rms(const at::Tensor& t) { return t.detach().square().mean().sqrt().item<double>(); }

inline std::string same(const std::string& text) { return to_string(parse_graph(text)); }

inline State with(std::initializer_list<std::pair<const char*, std::vector<int64_t>>> parameters) {
  State state;
  for (const auto& [name, sizes] : parameters) parameter(state, name, randn_there(sizes) * 0.02 + 0.001);
  return state;
}

}  // namespace plumb::testing_unit_scale
