// Reads of a captured forward besides its inputs: how they are noticed, and checks of the entries that
// plumb._capture.guards makes and owns.
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <string>

#include "module.h"

namespace plumb::python {
namespace {

// Kinds of an entry of plumb._capture.guards, (kind, holder, key, expected, contents): the condition on the object.
enum class Kind {
  Item,       // holder[key] of a dict is this object
  Missing,    // holder has no such key
  Attribute,  // getattr(holder, key) is this object
  Tensor,     // holder[key] of a dict is a tensor of this (dtype, device, shape)
  Type,       // type(holder) is this class
  Cell,       // the cell `holder` of a closure holds this object
};

// Returns whether an array holds these bytes. False also for an array that has no buffer (of dates, say).
bool holds_bytes(PyObject* array, PyObject* bytes) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_FULL_RO) != 0) return false;
  bool same = view.len == PyBytes_GET_SIZE(bytes);
  if (same && PyBuffer_IsContiguous(&view, 'C')) {
    same = std::memcmp(view.buf, PyBytes_AS_STRING(bytes), static_cast<size_t>(view.len)) == 0;
  } else if (same) {
    std::string now(static_cast<size_t>(view.len), '\0');
    same = PyBuffer_ToContiguous(now.data(), &view, view.len, 'C') == 0 &&
           std::memcmp(now.data(), PyBytes_AS_STRING(bytes), now.size()) == 0;
  }
  PyBuffer_Release(&view);
  return same;
}

// Returns whether a dict, list or set holds the very objects of `snapshot`, an array its bytes. A dict's keys and
// values alternate.
bool holds(PyObject* container, PyObject* snapshot) {
  if (PyBytes_Check(snapshot)) return holds_bytes(container, snapshot);
  if (PyDict_Check(container)) {
    if (2 * PyDict_GET_SIZE(container) != PyTuple_GET_SIZE(snapshot)) return false;
    Py_ssize_t at = 0, i = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(container, &at, &key, &value)) {
      if (PyTuple_GET_ITEM(snapshot, i) != key || PyTuple_GET_ITEM(snapshot, i + 1) != value) return false;
      i += 2;
    }
    return true;
  }
  if (PyList_Check(container)) {
    const Py_ssize_t size = PyTuple_GET_SIZE(snapshot);
    if (PyList_GET_SIZE(container) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (PyList_GET_ITEM(container, i) != PyTuple_GET_ITEM(snapshot, i)) return false;
    }
    return true;
  }
  if (PyAnySet_Check(container)) {  // compared by identity: PySet_Contains takes 1.0 for 1
    const auto parts = py::reinterpret_steal<py::tuple>(PySequence_Tuple(container));
    if (!parts || PyTuple_GET_SIZE(parts.ptr()) != PyTuple_GET_SIZE(snapshot)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(snapshot); ++i) {
      if (PyTuple_GET_ITEM(parts.ptr(), i) != PyTuple_GET_ITEM(snapshot, i)) return false;
    }
    return true;
  }
  return false;
}

bool is_like(PyObject* found, PyObject* expected) {
  if (!THPVariable_Check(found) || !PyTuple_Check(expected)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(found);
  PyObject* dtype = PyTuple_GET_ITEM(expected, 0);
  PyObject* device = PyTuple_GET_ITEM(expected, 1);
  PyObject* shape = PyTuple_GET_ITEM(expected, 2);
  if (tensor.scalar_type() != reinterpret_cast<THPDtype*>(dtype)->scalar_type) return false;
  if (tensor.device() != reinterpret_cast<THPDevice*>(device)->device) return false;
  if (tensor.dim() != PyTuple_GET_SIZE(shape)) return false;
  if (tensor.is_nested()) return true;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d)) != tensor.size(d)) return false;
  }
  return true;
}

bool is_as_expected(PyObject* entry) {
  PyObject* holder = PyTuple_GET_ITEM(entry, 1);
  PyObject* key = PyTuple_GET_ITEM(entry, 2);
  PyObject* expected = PyTuple_GET_ITEM(entry, 3);
  PyObject* contents = PyTuple_GET_ITEM(entry, 4);
  switch (static_cast<Kind>(PyLong_AsLong(PyTuple_GET_ITEM(entry, 0)))) {
    case Kind::Item:
      if (PyDict_GetItemWithError(holder, key) != expected) return false;
      break;
    case Kind::Missing: return PyDict_GetItemWithError(holder, key) == nullptr;
    case Kind::Attribute: {
      PyObject* found = PyObject_GetAttr(holder, key);
      if (found == nullptr) return false;
      Py_DECREF(found);
      if (found != expected) return false;
      break;
    }
    case Kind::Tensor: {
      PyObject* found = PyDict_GetItemWithError(holder, key);
      return found != nullptr && is_like(found, expected);
    }
    case Kind::Type: return reinterpret_cast<PyObject*>(Py_TYPE(holder)) == expected;
    case Kind::Cell:
      if (PyCell_GET(holder) != expected) return false;
      break;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(contents); i += 2) {
    if (!holds(PyTuple_GET_ITEM(contents, i), PyTuple_GET_ITEM(contents, i + 1))) return false;
  }
  return true;
}

// The place of the first entry from `start` on that does not find the very objects it was made for, or -1.
Py_ssize_t first_changed(const py::list& entries, Py_ssize_t start) {
  for (Py_ssize_t i = start; i < PyList_GET_SIZE(entries.ptr()); ++i) {
    // Held: what an attribute's own code does may change the list.
    const auto entry = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(entries.ptr(), i));
    const bool same = is_as_expected(entry.ptr());
    PyErr_Clear();
    if (!same) return i;
  }
  return -1;
}

// Whether several guards' entries find the very objects they were made for.
bool unchanged(const py::args& guards) {
  for (py::handle entries : guards) {
    if (first_changed(py::reinterpret_borrow<py::list>(entries), 0) >= 0) return false;
  }
  return true;
}

// The training modes of modules, one character a module. `tables`: their __dict__s.
py::object modes_of(const py::list& tables, const py::str& key) {
  const Py_ssize_t size = PyList_GET_SIZE(tables.ptr());
  std::string modes(static_cast<size_t>(size), '0');
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* mode = PyDict_GetItemWithError(PyList_GET_ITEM(tables.ptr(), i), key.ptr());
    if (mode == nullptr) PyErr_Clear();
    modes[static_cast<size_t>(i)] = mode == nullptr ? '-' : mode == Py_False || mode == Py_None ? '0' : '1';
  }
  return py::bytes(modes);
}

// The __getattribute__ of a class. `state`: (function of owner and name, that of an owner with another base behind this
// class, names that neither is called for, the class). A forward reads most attributes inside of nn.Module's own call,
// which nobody notes.
PyObject* read_attribute(PyObject* state, PyObject* const* arguments, Py_ssize_t size) {
  if (size != 2 || !PyUnicode_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "attribute name must be string");
    return nullptr;
  }
  PyObject* name = arguments[1];
  PyObject* bases = Py_TYPE(arguments[0])->tp_mro;
  const Py_ssize_t last = PyTuple_GET_SIZE(bases) - 1;  // object
  if (last < 1 || PyTuple_GET_ITEM(bases, last - 1) != PyTuple_GET_ITEM(state, 3))
    return PyObject_Vectorcall(PyTuple_GET_ITEM(state, 1), arguments, 2, nullptr);
  const bool special =
      PyUnicode_GET_LENGTH(name) > 1 && PyUnicode_READ_CHAR(name, 0) == '_' && PyUnicode_READ_CHAR(name, 1) == '_';
  const int unnoted = special ? 1 : PySet_Contains(PyTuple_GET_ITEM(state, 2), name);
  if (unnoted < 0) return nullptr;  // raised by the name's own __hash__
  if (unnoted == 1) return PyObject_GenericGetAttr(arguments[0], name);
  return PyObject_Vectorcall(PyTuple_GET_ITEM(state, 0), arguments, 2, nullptr);
}

PyMethodDef read_definition{"__getattribute__",
                            reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&read_attribute)), METH_FASTCALL,
                            nullptr};

py::object attribute_reader(const py::function& noting, const py::function& behind, const py::frozenset& unnoted,
                            const py::type& cls) {
  const auto state = py::make_tuple(noting, behind, unnoted, cls);
  const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&read_definition, state.ptr()));
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
}

Register guards_part([](py::module_& m) {
  m.def("attribute_reader", &attribute_reader, py::arg("noting"), py::arg("behind"), py::arg("unnoted"), py::arg("cls"),
        "Returns a ``__getattribute__`` for `cls` that is `noting`, but object's for names that are `unnoted` or begin "
        "with two underscores. It is `behind` for an object whose class has other bases behind `cls`.");
  m.def("first_changed", &first_changed, py::arg("entries"), py::arg("start") = 0);
  m.def("unchanged", &unchanged);
  m.def("modes_of", &modes_of, py::arg("tables"), py::arg("key"));
});

}  // namespace
}  // namespace plumb::python
