// The stage backward for Python.
#include <torch/csrc/autograd/python_cpp_function.h>

#include "module.h"
#include "plumb/pipeline/backward_halves.h"
#include "tensors.h"

namespace plumb::python {
namespace {

// A node of autograd's graph as torch shows it in Python.
py::object to_node(const NodePtr& node) {
  if (!node) return py::none();
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
}

Register part([](py::module_& m) {
  py::class_<DeferredWeights>(m, "DeferredWeights", "What the weight half of a stage backward still has to do.")
      .def_property_readonly("pending", &DeferredWeights::pending)
      // Where it starts: [(node, number of its input, gradient, node that made the gradient in the input half or None)]
      .def_property_readonly("starts", [](const DeferredWeights& deferred) {
        py::list list;
        for (const auto& s : BackwardAccess::starts(deferred)) {
          list.append(py::make_tuple(to_node(s.edge.function), s.edge.input_nr, s.grad, to_node(s.maker)));
        }
        return list;
      });
  m.def("stage_backward", [](const py::sequence& outputs, const py::sequence& grads, const py::sequence& inputs) {
    const auto o = to_tensors(outputs), g = to_tensors(grads), i = to_tensors(inputs);
    Tensors result;
    {
      py::gil_scoped_release free;
      result = stage_backward(o, g, i);
    }
    return to_list(result);
  });
  m.def("stage_backward_input", [](const py::sequence& outputs, const py::sequence& grads, const py::sequence& inputs) {
    const auto o = to_tensors(outputs), g = to_tensors(grads), i = to_tensors(inputs);
    InputHalf half;
    {
      py::gil_scoped_release free;
      half = stage_backward_input(o, g, i);
    }
    return py::make_tuple(to_list(half.input_grads), std::move(half.deferred));
  });
  m.def(
      "stage_backward_weight",
      [](DeferredWeights& deferred, bool retain_graph) {
        py::gil_scoped_release free;
        stage_backward_weight(deferred, retain_graph);
      },
      py::arg("deferred"), py::arg("retain_graph") = false);
});

}  // namespace
}  // namespace plumb::python
