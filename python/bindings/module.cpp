#include "module.h"

#include "plumb/core/error.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "plumb's C++ engine";
  // plumb.Error is a RuntimeError, so that code that caught torch's errors goes on working.
  py::register_exception<plumb::Error>(m, "Error", PyExc_RuntimeError);
  for (const auto& bind : plumb::python::bindings()) bind(m);
}
