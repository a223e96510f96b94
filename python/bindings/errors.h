// plumb::Error and plumb.Error: one carries over into the other with all its fields. And calls of Python from C++.
#pragma once

#include "convert.h"

namespace plumb::python {

// The Error that a Python exception stands for: a plumb.Error with its fields; any other is of kind ExecutionFailed and
// reads "ValueError: what it said". What is no Exception (KeyboardInterrupt, SystemExit) is kept for the thread: the
// next Error that leaves for Python there is raised as it. Needs the GIL.
Error to_error(const py::error_already_set& error);

// f() under the GIL. Python's exceptions must not travel through code without it, and become Errors.
template <typename F>
auto with_gil(const F& f) {
  py::gil_scoped_acquire gil;
  try {
    return f();
  } catch (const py::error_already_set& error) {
    throw to_error(error);
  }
}

// An object whose last copy may be let go without the GIL.
inline std::shared_ptr<py::object> held(py::object object) {
  return {new py::object(std::move(object)), [](py::object* last) {
            py::gil_scoped_acquire gil;
            delete last;
          }};
}

}  // namespace plumb::python
