#include "module.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "plumb's C++ engine";
  for (const auto& bind : plumb::python::bindings()) bind(m);
}
