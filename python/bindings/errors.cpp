#include "errors.h"

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <utility>

#include "module.h"

namespace plumb::python {
namespace {

// plumb.Error, which Python defines (python/plumb/_errors.py). Never freed: errors may outlive the interpreter.
py::object& error_class() {
  static auto* held = new py::object;
  return *held;
}

// The interrupt (KeyboardInterrupt, SystemExit) that ended Python code which the engine called on this thread; owned.
// It is the user's and no failure of what was interrupted: it takes the place of the Error that it became.
thread_local PyObject* interrupt = nullptr;

// Returns the Python exception that `error` stands for or has nested; null if there is none.
py::object cause_of(const std::exception& error) {
  if (const auto* raised = dynamic_cast<const RaisedError*>(&error)) return raised->exception();
  if (const auto* raised = dynamic_cast<const python_error*>(&error);  // from autograd
      raised != nullptr && raised->value != nullptr && PyExceptionInstance_Check(raised->value)) {
    if (raised->traceback != nullptr) PyException_SetTraceback(raised->value, raised->traceback);
    return py::reinterpret_borrow<py::object>(raised->value);
  }
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& nested) {
    return cause_of(nested);
  }
  return {};
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& e) {
    if (interrupt != nullptr) {
      const auto raised = py::reinterpret_steal<py::object>(std::exchange(interrupt, nullptr));
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
      return;
    }
    const py::object error =
        error_class()(readable(e.message()), py::arg("kind") = e.kind(), py::arg("where") = readable(e.where()),
                      py::arg("remedy") = readable(e.remedy()));
    if (py::object cause = cause_of(e)) PyException_SetCause(error.ptr(), cause.release().ptr());
    PyErr_SetObject(error_class().ptr(), error.ptr());
  }
}

Register errors_part([](py::module_& m) {
  py::enum_<ErrorKind> kinds(m, "ErrorKind", "Kind of an error: what the code decides by.");
#define PLUMB_ERROR_KIND(name, meaning) kinds.value(#name, ErrorKind::name, meaning);
  PLUMB_ERROR_KINDS(PLUMB_ERROR_KIND)
#undef PLUMB_ERROR_KIND
  m.def("error_text", &Error::text, py::arg("message"), py::arg("where"), py::arg("remedy"));
  m.def(
      "set_error_class",
      [module = py::handle(m)](py::object type) {
        module.attr("Error") = type;
        error_class() = std::move(type);
      },
      py::arg("cls"));
  py::register_exception_translator(&translate);
});

}  // namespace

void throw_error(const py::error_already_set& error) {
  if (error_class() && error.matches(error_class())) {
    const py::object& e = error.value();
    Error same(e.attr("kind").cast<ErrorKind>(), py::str(e.attr("message")), py::str(e.attr("where")),
               py::str(e.attr("remedy")));
    if (py::object cause = e.attr("__cause__"); !cause.is_none()) throw RaisedError(std::move(same), std::move(cause));
    throw same;
  }
  if (error.trace()) PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
  if (!error.matches(PyExc_Exception)) Py_XDECREF(std::exchange(interrupt, error.value().inc_ref().ptr()));
  Error text(ErrorKind::ExecutionFailed,
             utf8_of(error.type().attr("__name__")) + ": " + utf8_of(py::str(error.value())));
  throw RaisedError(std::move(text), error.value());
}

}  // namespace plumb::python
