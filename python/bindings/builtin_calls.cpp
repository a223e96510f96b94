// Calls of a builtin function go elsewhere for a while: torch.autograd.Function.apply is one since torch 2.14.
// Everything that depends on the insides of CPython's builtin functions stands here. A builtin function, also one that
// a class method was bound to, points to its definition, and a call reads the C function from there. So a change of the
// definition reaches callers that hold the function itself.
#include <algorithm>

#include "module.h"

namespace plumb::python {
namespace {

constexpr int kTakesKeywords = METH_VARARGS | METH_KEYWORDS;

PyMethodDef* definition = nullptr;
PyCFunctionWithKeywords builtin = nullptr;
std::vector<py::object> targets;  // the last one is called first

// Calls the targets below `level`; below the first one is the builtin function. args: the object it is bound to first.
py::object call(size_t level, const py::tuple& args, const py::dict& kwargs) {
  level = std::min(level, targets.size());  // calls of another thread may outlast a target
  if (level == 0) {
    const auto given = py::reinterpret_steal<py::tuple>(PyTuple_GetSlice(args.ptr(), 1, PY_SSIZE_T_MAX));
    PyObject* result = builtin(py::handle(args[0]).ptr(), given.ptr(), kwargs.empty() ? nullptr : kwargs.ptr());
    if (!result) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }
  const py::object target = targets[level - 1];
  const py::cpp_function original([level](const py::args& a, const py::kwargs& k) { return call(level - 1, a, k); });
  return target(original, args, kwargs);
}

PyObject* redirected(PyObject* self, PyObject* args, PyObject* kwargs) {
  try {
    const auto own = py::make_tuple(py::reinterpret_borrow<py::object>(self));
    const auto all = py::reinterpret_steal<py::tuple>(PySequence_Concat(own.ptr(), args));
    const auto named = kwargs ? py::reinterpret_borrow<py::dict>(kwargs) : py::dict();
    return call(targets.size(), all, named).release().ptr();
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

void redirect(const py::object& function, const py::object& target) {
  if (!PyCFunction_Check(function.ptr())) throw py::type_error("not a builtin function");
  PyMethodDef* its = reinterpret_cast<PyCFunctionObject*>(function.ptr())->m_ml;
  if ((its->ml_flags & kTakesKeywords) != kTakesKeywords || (!targets.empty() && its != definition))
    throw py::type_error("takes no keywords, or another builtin function's calls go elsewhere now");
  if (targets.empty()) {
    definition = its;
    builtin = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(its->ml_meth));
  }
  targets.push_back(target);
  its->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&redirected));
}

void undo() {
  if (targets.empty()) return;
  targets.pop_back();
  if (targets.empty()) definition->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(builtin));
}

Register builtin_calls_part([](py::module_& m) {
  m.def(
      "redirect_builtin", &redirect, py::arg("function"), py::arg("target"),
      "From now on ``function(*args, **kwargs)``, a class method, is ``target(original, (cls, *args), kwargs)`` in the "
      "whole process, until ``restore_builtin()``. Only one function at a time.");
  m.def("restore_builtin", &undo, "Ends the last ``redirect_builtin()``.");
});

}  // namespace
}  // namespace plumb::python
