// Python leaves (tensors, numbers, None, ...) <-> IValue. Structure is flattened in Python before it gets here.
#pragma once

#include <torch/extension.h>

#include <vector>

#include "plumb/core/error.h"

namespace plumb::python {

inline c10::IValue to_ivalue(py::handle h) {
  if (h.is_none()) return {};
  if (THPVariable_Check(h.ptr())) return THPVariable_Unpack(h.ptr());
  if (py::isinstance<py::bool_>(h)) return h.cast<bool>();
  if (py::isinstance<py::int_>(h)) return h.cast<int64_t>();
  if (py::isinstance<py::float_>(h)) return h.cast<double>();
  if (py::isinstance<py::str>(h)) return h.cast<std::string>();
  if (PyComplex_Check(h.ptr())) return h.cast<c10::complex<double>>();
  if (THPDevice_Check(h.ptr())) return reinterpret_cast<THPDevice*>(h.ptr())->device;
  if (THPDtype_Check(h.ptr())) return static_cast<int64_t>(reinterpret_cast<THPDtype*>(h.ptr())->scalar_type);
  if (py::isinstance<py::list>(h) || py::isinstance<py::tuple>(h)) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (py::handle e : h) list.push_back(to_ivalue(e));
    return list;
  }
  throw Error(ErrorKind::Unsupported,
              "a value of type " + py::str(py::type::of(h)).cast<std::string>() + " cannot be used here");
}

inline py::object to_python(const c10::IValue& v) {
  if (v.isNone()) return py::none();
  if (v.isTensor()) return v.toTensor().defined() ? py::cast(v.toTensor()) : py::none();
  if (v.isBool()) return py::bool_(v.toBool());
  if (v.isInt()) return py::int_(v.toInt());
  if (v.isDouble()) return py::float_(v.toDouble());
  if (v.isString()) return py::str(v.toStringRef());
  if (v.isComplexDouble())
    return py::cast(std::complex<double>(v.toComplexDouble().real(), v.toComplexDouble().imag()));
  if (v.isDevice()) return py::cast(v.toDevice());
  if (v.isList()) {
    py::list list;
    for (const c10::IValue& e : v.toListRef()) list.append(to_python(e));
    return list;
  }
  throw Error(ErrorKind::Unsupported, "a value of kind " + v.tagKind() + " has no Python form");
}

inline std::vector<c10::IValue> to_ivalues(const py::list& list) {
  std::vector<c10::IValue> values;
  values.reserve(list.size());
  for (py::handle h : list) values.push_back(to_ivalue(h));
  return values;
}

inline py::list to_list(const std::vector<c10::IValue>& values) {
  py::list list(values.size());
  for (size_t i = 0; i < values.size(); ++i) list[i] = to_python(values[i]);
  return list;
}

}  // namespace plumb::python
