// Diffs: the engine compares, Python runs the modules.
#include <pybind11/functional.h>

#include <nlohmann/json.hpp>

#include "errors.h"
#include "module.h"
#include "plumb/analysis/diff_page.h"
#include "plumb/recording/module_diff.h"

namespace plumb::python {
namespace {

using namespace py::literals;

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
      .def(py::init<const GraphModule&, const GraphModule&>(), "a"_a, "b"_a)
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
