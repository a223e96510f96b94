// Values between Python and C++, for every file of bindings. Structure is flattened in Python before it gets here.
#pragma once

#include <torch/extension.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/graph/meta.h"
#include "plumb/graph/state.h"

namespace plumb::python {

using namespace py::literals;
using Tensors = std::vector<at::Tensor>;
using FreeGil = py::call_guard<py::gil_scoped_release>;

inline std::string type_name(py::handle h) { return py::str(py::type::of(h)).cast<std::string>(); }

// Returns a text of Python's in UTF-8. Surrogates, as of a file's name that is no UTF-8, become escapes.
inline std::string utf8_of(py::handle text) {
  auto bytes = py::reinterpret_steal<py::object>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes.cast<std::string>();
}

// Returns a text for Python. Names from a model, and bytes of files in messages, need not be UTF-8.
inline py::str readable(std::string_view text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// Leaves: tensors, numbers, None, ...
inline c10::IValue to_ivalue(py::handle h) {
  if (h.is_none()) return {};
  if (THPVariable_Check(h.ptr())) return THPVariable_Unpack(h.ptr());
  if (py::isinstance<py::bool_>(h)) return h.cast<bool>();
  if (py::isinstance<py::int_>(h)) return h.cast<int64_t>();
  if (py::isinstance<py::float_>(h)) return h.cast<double>();
  if (py::isinstance<py::str>(h)) return h.cast<std::string>();
  if (PyComplex_Check(h.ptr())) return h.cast<c10::complex<double>>();
  if (THPDevice_Check(h.ptr())) return h.cast<at::Device>();
  if (THPDtype_Check(h.ptr())) return static_cast<int64_t>(h.cast<at::ScalarType>());
  if (py::isinstance<py::list>(h) || py::isinstance<py::tuple>(h)) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (py::handle e : h) list.push_back(to_ivalue(e));
    return list;
  }
  throw Error(ErrorKind::Unsupported, "a value of type " + type_name(h) + " cannot be used here");
}

inline py::object to_python(const c10::IValue& v) {
  if (v.isNone()) return py::none();
  if (v.isTensor()) return py::cast(v.toTensor());
  if (v.isBool()) return py::bool_(v.toBool());
  if (v.isInt()) return py::int_(v.toInt());
  if (v.isDouble()) return py::float_(v.toDouble());
  if (v.isString()) return py::str(v.toStringRef());
  if (v.isComplexDouble()) return py::cast(v.toComplexDouble());
  if (v.isDevice()) return py::cast(v.toDevice());
  if (v.isList()) {
    py::list list;
    for (const c10::IValue& e : v.toListRef()) list.append(to_python(e));
    return list;
  }
  throw Error(ErrorKind::Unsupported, "a value of kind " + v.tagKind() + " has no Python form");
}

// None for what is not known.
inline py::object to_python(const std::optional<TensorMeta>& m) {
  if (!m) return py::none();
  return py::dict("dtype"_a = m->dtype, "shape"_a = py::tuple(py::cast(m->sizes)),
                  "stride"_a = py::tuple(py::cast(m->strides)), "device"_a = m->device,
                  "requires_grad"_a = m->requires_grad, "symbols"_a = m->symbols);
}

using StateEntry = std::tuple<std::string, int, at::Tensor, bool>;  // name, kind, tensor, persistent

inline std::vector<StateEntry> to_entries(const State& state) {
  std::vector<StateEntry> all;
  for (const Attr& a : state) all.emplace_back(a.name, static_cast<int>(a.kind), a.tensor, a.persistent);
  return all;
}

inline State to_state(const std::vector<StateEntry>& entries) {
  State state;
  for (const auto& [name, kind, tensor, persistent] : entries)
    state.add({name, static_cast<AttrKind>(kind), tensor, persistent});
  return state;
}

}  // namespace plumb::python

PYBIND11_NAMESPACE_BEGIN(PYBIND11_NAMESPACE)
PYBIND11_NAMESPACE_BEGIN(detail)

template <>
struct type_caster<c10::IValue> {
  PYBIND11_TYPE_CASTER(c10::IValue, const_name("object"));
  bool load(handle h, bool) {
    value = plumb::python::to_ivalue(h);
    return true;
  }
  static handle cast(const c10::IValue& v, return_value_policy, handle) {
    return plumb::python::to_python(v).release();
  }
};

// Any of these tensors may be missing: None.
template <>
struct type_caster<plumb::python::Tensors> : list_caster<plumb::python::Tensors, at::Tensor> {
  bool load(handle list, bool) {
    if (!isinstance<sequence>(list)) return false;
    value.clear();
    for (handle h : list) {
      if (!h.is_none() && !THPVariable_Check(h.ptr())) {
        throw plumb::Error(plumb::ErrorKind::TensorMismatch,
                           "a value of type " + plumb::python::type_name(h) + " stands where a tensor or None belongs");
      }
      value.push_back(h.is_none() ? at::Tensor() : THPVariable_Unpack(h.ptr()));
    }
    return true;
  }
};

PYBIND11_NAMESPACE_END(detail)
PYBIND11_NAMESPACE_END(PYBIND11_NAMESPACE)
