// Lists of tensors, of which each may be missing, between Python and C++.
#pragma once

#include "module.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/core/error.h"

namespace plumb::python {

inline at::Tensor to_tensor(py::handle h) {
  if (h.is_none()) return {};
  if (!THPVariable_Check(h.ptr())) {
    throw Error(ErrorKind::TensorMismatch, "a value of type " + py::str(py::type::of(h)).cast<std::string>() +
                                               " stands where a tensor or None belongs");
  }
  return THPVariable_Unpack(h.ptr());
}

inline Tensors to_tensors(const py::sequence& list) {
  Tensors tensors;
  tensors.reserve(py::len(list));
  for (py::handle h : list) tensors.push_back(to_tensor(h));
  return tensors;
}

inline py::list to_list(const Tensors& tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    list[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::object(py::none());
  }
  return list;
}

}  // namespace plumb::python
