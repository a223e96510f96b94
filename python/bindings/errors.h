// plumb::Error and plumb.Error: one carries over into the other with all its fields. And calls of Python from C++.
#pragma once

#include <memory>
#include <utility>

#include "convert.h"

namespace plumb::python {

// An object whose last copy may be let go without the GIL.
inline std::shared_ptr<py::object> held(py::object object) {
  return {new py::object(std::move(object)), [](py::object* last) {
            py::gil_scoped_acquire gil;
            delete last;
          }};
}

// An Error that stands for an exception of Python code which the engine called. The exception becomes the __cause__ of
// the plumb.Error that is made of this, or of an Error that has this nested (std::throw_with_nested).
class RaisedError : public Error {
 public:
  RaisedError(Error error, py::object exception) : Error(std::move(error)), exception_(held(std::move(exception))) {}
  const py::object& exception() const { return *exception_; }

 private:
  std::shared_ptr<py::object> exception_;
};

// Throws the Error that a Python exception stands for: a plumb.Error with its fields; any other is a RaisedError of
// kind ExecutionFailed and reads "ValueError: what it said". What is no Exception (KeyboardInterrupt, SystemExit) is
// kept for the thread: the next Error that leaves for Python there is raised as it. Needs the GIL.
[[noreturn]] void throw_error(const py::error_already_set& error);

// f() under the GIL. Python's exceptions must not travel through code without it, and become Errors.
template <typename F>
auto with_gil(const F& f) {
  py::gil_scoped_acquire gil;
  try {
    return f();
  } catch (const py::error_already_set& error) {
    throw_error(error);
  }
}

}  // namespace plumb::python
