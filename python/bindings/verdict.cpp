// The verdict on number formats: the engine asks Python for the loss of each graph.
#include <pybind11/functional.h>

#include "errors.h"
#include "module.h"
#include "plumb/analysis/verdict_page.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb::python {
namespace {

const Register verdict_part([](py::module_& m) {
  py::class_<VerdictReport>(m, "VerdictReport")
      .def("to_json", [](const VerdictReport& report) { return report.to_json().dump(); })
      .def("to_text", &VerdictReport::to_text)
      .def(
          "page",
          [](const VerdictReport& report, const std::string& model) { return verdict_page(report, model).html(); },
          py::arg("model"));
  // The loss of a graph is asked for with the interpreter's lock; everything else runs without.
  using Loss = std::function<at::Tensor(std::shared_ptr<GraphModule>)>;
  const auto parts = [](const Loss& loss) -> Verdict::Parts {
    return {
        [&loss](GraphModule& graph) { return loss(std::static_pointer_cast<GraphModule>(graph.shared_from_this())); }};
  };
  py::class_<Verdict>(m, "Verdict")
      .def(py::init([](const GraphModule& module, const std::vector<std::string>& recipes, bool explain) {
             return std::make_unique<Verdict>(module, VerdictOptions{.recipes = recipes, .explain = explain});
           }),
           py::arg("module"), py::arg("recipes"), py::arg("explain"))
      .def(
          "measure", [parts](Verdict& verdict, const Loss& loss) { verdict.measure(parts(loss)); }, FreeGil(),
          py::arg("loss"))
      .def(
          "conclude", [parts](Verdict& verdict, const Loss& loss) { return verdict.conclude(parts(loss)); }, FreeGil(),
          py::arg("loss"));
  m.def("default_verdict_recipes", &default_verdict_recipes);
  m.def("verdict_steps", &verdict_steps, py::arg("count"), py::arg("warmup"));
});

}  // namespace
}  // namespace plumb::python
