// Costs of a schedule's stages from a Python dict.
#pragma once

#include <torch/extension.h>

#include "plumb/core/error.h"
#include "plumb/schedule/simulate.h"

namespace plumb::python {

// {"forward": number or a list by stage, ...}: the names of plumb::Costs.
inline Costs to_costs(const py::dict& given) {
  Costs costs;
  auto list = [](py::handle h) {
    return py::isinstance<py::sequence>(h) ? h.cast<std::vector<double>>() : std::vector<double>{h.cast<double>()};
  };
  for (auto [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "forward") {
      costs.forward = list(value);
    } else if (name == "input") {
      costs.input = list(value);
    } else if (name == "weight") {
      costs.weight = list(value);
    } else if (name == "full") {
      costs.full = list(value);
    } else if (name == "communication") {
      costs.communication = list(value);
    } else if (name == "activation") {
      costs.activation = list(value);
    } else if (name == "overlap") {
      costs.overlap = value.cast<double>();
    } else if (name == "held_for_weight") {
      costs.held_for_weight = value.cast<double>();
    } else {
      throw Error(ErrorKind::UnknownName, "there is no cost named '" + name + "'", "",
                  "use forward, input, weight, full, communication, overlap, activation, held_for_weight");
    }
  }
  return costs;
}

}  // namespace plumb::python
