// Costs of a schedule's stages from a Python dict.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "convert.h"
#include "plumb/schedule/simulate.h"

namespace plumb::python {

using CostLists = std::vector<double>;

inline CostLists to_list(const py::handle& value) {
  return py::isinstance<py::sequence>(value) ? value.cast<CostLists>() : CostLists{value.cast<double>()};
}

template <class Fields>
const auto& field_of(const Fields& fields, const std::string& name, const std::string& others = "") {
  const auto field = fields.find(name);
  if (field != fields.end()) return field->second;
  std::string names;
  for (const auto& [known, member] : fields) names += (names.empty() ? "use " : ", ") + known;
  throw Error(ErrorKind::UnknownName, "there is no cost named '" + name + "'", "", names + others);
}

// {"forward": number or a list by stage, ...}: the names of plumb::Costs; "working" is a dict of those of its Working.
inline Costs to_costs(const py::dict& given) {
  using Working = Costs::Working;
  static const std::map<std::string, CostLists Costs::*> kLists = {
      {"forward", &Costs::forward},       {"input", &Costs::input},
      {"weight", &Costs::weight},         {"full", &Costs::full},
      {"activation", &Costs::activation}, {"communication", &Costs::communication},
      {"gradient", &Costs::gradient},     {"held_for_weight", &Costs::held_for_weight},
      {"values", &Costs::values},         {"buffers", &Costs::buffers},
      {"copies", &Costs::copies}};
  static const std::map<std::string, CostLists Working::*> kWorking = {
      {"forward", &Working::forward},           {"input", &Working::input}, {"weight", &Working::weight},
      {"first_weight", &Working::first_weight}, {"full", &Working::full},   {"first_full", &Working::first_full}};
  Costs costs;
  for (auto [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "overlap") {
      costs.overlap = value.cast<double>();
    } else if (name == "working") {
      for (auto [kind, bytes] : value.cast<py::dict>())
        costs.working.*field_of(kWorking, kind.cast<std::string>()) = to_list(bytes);
    } else {
      costs.*field_of(kLists, name, ", overlap, working") = to_list(value);
    }
  }
  return costs;
}

}  // namespace plumb::python
