// Costs of a schedule's stages from a Python dict.
#pragma once

#include <map>
#include <variant>

#include "convert.h"
#include "plumb/schedule/simulate.h"

namespace plumb::python {

// {"forward": number or a list by stage, ...}: the names of plumb::Costs.
inline Costs to_costs(const py::dict& given) {
  using Lists = std::vector<double>;
  static const std::map<std::string, std::variant<Lists Costs::*, double Costs::*>> kFields = {
      {"forward", &Costs::forward},       {"input", &Costs::input},
      {"weight", &Costs::weight},         {"full", &Costs::full},
      {"overlap", &Costs::overlap},       {"communication", &Costs::communication},
      {"activation", &Costs::activation}, {"held_for_weight", &Costs::held_for_weight}};
  Costs costs;
  for (auto [key, value] : given) {
    const auto name = key.cast<std::string>();
    const auto field = kFields.find(name);
    if (field == kFields.end()) {
      throw Error(ErrorKind::UnknownName, "there is no cost named '" + name + "'", "",
                  "use forward, input, weight, full, communication, overlap, activation, held_for_weight");
    }
    if (const auto* number = std::get_if<double Costs::*>(&field->second)) {
      costs.*(*number) = value.cast<double>();
    } else {
      const bool by_stage = py::isinstance<py::sequence>(value);
      costs.*std::get<Lists Costs::*>(field->second) = by_stage ? value.cast<Lists>() : Lists{value.cast<double>()};
    }
  }
  return costs;
}

}  // namespace plumb::python
