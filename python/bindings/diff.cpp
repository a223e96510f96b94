// Diffs: the engine compares, Python runs the modules.
#include <pybind11/functional.h>

#include <nlohmann/json.hpp>

#include "errors.h"
#include "module.h"
#include "plumb/analysis/diff_page.h"
#include "plumb/recording/module_diff.h"
#include "plumb/transforms/module.h"

namespace plumb::python {
namespace {

using namespace py::literals;

// Returns the module with these outputs where they are not None: the graph of a capture does not know its constant
// ones.
std::shared_ptr<GraphModule> with_constants(const GraphModule& module, const std::vector<c10::IValue>& outputs) {
  auto made = derive(module);
  for (size_t i = 0; i < outputs.size(); ++i)
    if (!outputs[i].isNone()) made->graph().output_node()->set_arg(i, outputs[i]);
  return made;
}

const Register diff_part([](py::module_& m) {
  py::class_<DiffReport>(m, "DiffReport")
      .def("to_json",
           [](const DiffReport& report) {
             return report.to_json().dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
           })
      .def("to_text", &DiffReport::to_text)
      .def("page", [](const DiffReport& report) { return diff_page(report).html(); });
  m.def(
      "diff_histories",
      [](const History& a, const History& b, const std::string& of_a, const std::string& of_b) {
        return diff(a, b, {of_a, of_b});
      },
      FreeGil(), "a"_a, "b"_a, "of_a"_a, "of_b"_a);
  m.def("diff_tensors", [](const DiffTensors& a, const DiffTensors& b) { return diff(a, b); }, FreeGil(), "a"_a, "b"_a);
  m.def(
      "sum_of_outputs",
      [](const std::vector<at::Tensor>& outputs) -> std::optional<at::Tensor> {
        const at::Tensor sum = sum_of_outputs({outputs.begin(), outputs.end()});
        return sum.defined() ? std::optional(sum) : std::nullopt;
      },
      "outputs"_a);
  py::class_<ModuleDiff>(m, "ModuleDiff")
      .def(py::init([](const GraphModule& a, const GraphModule& b, const std::vector<c10::IValue>& outputs_a,
                       const std::vector<c10::IValue>& outputs_b) {
             return std::make_unique<ModuleDiff>(*with_constants(a, outputs_a), *with_constants(b, outputs_b));
           }),
           "a"_a, "b"_a, "outputs_a"_a, "outputs_b"_a)
      .def_readonly("a", &ModuleDiff::a)
      .def_readonly("b", &ModuleDiff::b)
      .def(
          "run",
          [](ModuleDiff& both, const std::function<std::optional<at::Tensor>(std::shared_ptr<GraphModule>)>& loss) {
            both.run([&](GraphModule& graph) {
              return loss(std::static_pointer_cast<GraphModule>(graph.shared_from_this())).value_or(at::Tensor());
            });
          },
          FreeGil(), "loss"_a)
      .def(
          "report", [](const ModuleDiff& both, double tolerance) { return both.report({}, tolerance); }, FreeGil(),
          "tolerance"_a);
});

}  // namespace
}  // namespace plumb::python
