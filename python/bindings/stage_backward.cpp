// The stage backward for Python.
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <typeindex>
#include <unordered_map>

#include "module.h"
#include "plumb/autograd/backward_checkpoints.h"
#include "plumb/autograd/backward_halves.h"

namespace plumb::python {
namespace {

// A node of autograd's graph as torch shows it in Python, None for none.
py::object to_node(const NodePtr& node) {
  if (!node) return py::none();
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
}

using torch::autograd::SavedVariable;

// The checkpoint that a variable was saved through: its unpack function, one for each. Null: none. Needs the GIL.
const void* checkpoint_of(const SavedVariable& variable) {
  if (!variable.has_hooks()) return nullptr;
  const auto hook = variable.retrieve_unpack_hook_data();
  if (!hook) return nullptr;
  const py::handle packed(hook->second.ptr(getPyInterpreter()));
  const auto module = py::str(py::getattr(py::type::of(packed), "__module__", py::str())).cast<std::string>();
  return module == "torch.utils.checkpoint" ? hook->first.ptr(getPyInterpreter()) : nullptr;
}

// The attributes of a class of nodes that hold what it saved. Every function written in Python has the same.
const std::vector<py::str>& saved_attributes(torch::autograd::Node& node) {
  static auto& known = *new std::unordered_map<std::type_index, std::vector<py::str>>();
  auto [it, fresh] = known.try_emplace(typeid(node));
  if (fresh) {
    for (py::handle name : py::reinterpret_steal<py::list>(PyObject_Dir(to_node(node.getptr()).ptr()))) {
      if (name.cast<std::string>().starts_with("_raw_saved_"))
        it->second.push_back(py::reinterpret_borrow<py::str>(name));
    }
  }
  return it->second;
}

// Finds the variables that a node saved through checkpoints. A node saves all its variables alike: one plain variable
// means that none is from a checkpoint.
void find_in(torch::autograd::Node& node, std::vector<CheckpointedVariable>& found) {
  bool plain = false;
  auto add = [&](const SavedVariable& variable) {
    const auto data = variable.get_raw_data();
    plain = plain || (data && data->defined());
    if (plain) return;
    if (const void* checkpoint = checkpoint_of(variable)) {
      found.push_back({const_cast<SavedVariable*>(&variable), &node, checkpoint});
    }
  };
  const auto& names = saved_attributes(node);
  // plumb's own nodes show what they saved in C++ alone.
  if (auto* own = names.empty() ? dynamic_cast<SavesTensors*>(&node) : nullptr) own->visit_saved(add);
  if (names.empty()) return;
  const py::object in_python = to_node(node.getptr());
  for (const auto& name : names) {
    const py::object value = in_python.attr(name);
    if (py::isinstance<py::tuple>(value)) {
      for (py::handle part : value) add(part.cast<const SavedVariable&>());
    } else if (!value.is_none()) {
      add(value.cast<const SavedVariable&>());
    }
    if (plain) return;
  }
}

std::vector<CheckpointedVariable> find_checkpointed(const std::vector<torch::autograd::Node*>& nodes) {
  std::vector<CheckpointedVariable> found;
  py::gil_scoped_acquire gil;
  for (torch::autograd::Node* node : nodes) {
    try {
      find_in(*node, found);
    } catch (const py::error_already_set&) {
      // Its saved variables are released; autograd reports that when it runs.
    }
  }
  return found;
}

Register stage_backward_part([](py::module_& m) {
  set_find_checkpointed(&find_checkpointed);
  py::class_<DeferredWeights>(m, "DeferredWeights", "Work that is left for the weight half of a stage's backward.")
      .def_property_readonly("pending", &DeferredWeights::pending)
      // Returns the places where it starts: [(node, number of its input, gradient, node that made the gradient in the
      // input half or None)]
      .def_property_readonly("starts", [](const DeferredWeights& deferred) {
        std::vector<py::tuple> list;
        if (!deferred.pending()) return list;
        for (const auto& s : deferred.state->starts)
          list.push_back(py::make_tuple(to_node(s.edge.function), s.edge.input_nr, s.grad, to_node(s.maker)));
        return list;
      });
  m.def("stage_backward", py::overload_cast<const Tensors&, const Tensors&, const Tensors&>(&plumb::stage_backward),
        FreeGil(), py::arg("outputs"), py::arg("grads"), py::arg("inputs"));
  m.def(
      "stage_backward_input",
      [](const Tensors& outputs, const Tensors& grads, const Tensors& inputs) {
        InputHalf half = stage_backward_input(outputs, grads, inputs);
        return std::make_pair(std::move(half.input_grads), std::move(half.deferred));
      },
      FreeGil(), py::arg("outputs"), py::arg("grads"), py::arg("inputs"));
  m.def("stage_backward_weight",
        py::overload_cast<DeferredWeights&, const Tensors&, bool>(&plumb::stage_backward_weight), py::arg("deferred"),
        py::arg("weights"), py::arg("retain_graph") = false, FreeGil());
});

}  // namespace
}  // namespace plumb::python
