// Each file of bindings adds its own part, named after it, to the one extension module:
//
//   static plumb::python::Register graph_part([](py::module_& m) { m.def("name", ...); });
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "convert.h"

namespace plumb::python {

inline std::vector<std::function<void(py::module_&)>>& bindings() {
  static std::vector<std::function<void(py::module_&)>> all;
  return all;
}

struct Register {
  explicit Register(std::function<void(py::module_&)> bind) { bindings().push_back(std::move(bind)); }
};

}  // namespace plumb::python
