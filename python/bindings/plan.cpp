// Plans: a model's costs measured, its schedules compared and searched, and plan files.
#include "errors.h"
#include "module.h"
#include "plumb/core/output_file.h"
#include "plumb/partition/size_policy.h"
#include "plumb/training/plan/plan_model.h"
#include "plumb/training/plan/plan_page.h"
#include "plumb/training/step/loss.h"

namespace plumb::python {
namespace {

struct PythonPlanned {
  std::shared_ptr<GraphModule> module;
  PlannedModel planned;
  int replicas = 1;
};

// From a callable of the outputs, a name of --loss, or None: the model's own loss, else cross_entropy.
std::function<at::Tensor(const Tensors&)> loss_of(const py::object& loss, const GraphModule& module) {
  if (loss.is_none() || py::isinstance<py::str>(loss))
    return example_loss(loss.is_none() ? "" : loss.cast<std::string>(), module);
  return [function = held(loss)](const Tensors& outputs) {
    return with_gil([&] {
      const py::object found = (*function)(*py::tuple(py::cast(outputs)));
      if (THPVariable_Check(found.ptr())) return found.cast<at::Tensor>();
      throw Error(ErrorKind::InvalidArgument, "the loss is a value of type " + type_name(found), "",
                  "return a tensor to go backward from");
    });
  };
}

std::unique_ptr<PythonPlanned> plan(std::shared_ptr<GraphModule> module, std::optional<std::vector<c10::IValue>> inputs,
                                    PlanRequest request, std::optional<double> memory, const py::object& loss,
                                    double gigabytes, double microseconds) {
  if (memory && !(*memory > 0))
    throw Error(ErrorKind::InvalidArgument, c10::str("memory ", *memory, " is no number of bytes above zero"), "",
                "memory=8e9, or None for what the quickest named schedule takes");
  if (memory) request.memory_limit = *memory;
  set_link(request.costs, gigabytes, microseconds);
  request.costs.loss = loss_of(loss, *module);
  auto made = std::make_unique<PythonPlanned>(PythonPlanned{module, {}, request.replicas});
  py::gil_scoped_release release;
  if (!inputs && !request.estimate) inputs = example_inputs(*module);
  made->planned = plan_model(*module, inputs.value_or(std::vector<c10::IValue>()), request);
  return made;
}

py::dict row_of(const ScheduleChoice& c) {
  py::dict row("schedule"_a = c.name, "stages_per_rank"_a = c.stages_per_rank, "fits"_a = c.fits,
               "problem"_a = c.problem);
  if (!c.problem.empty()) return row;
  row["step"] = c.simulation.makespan;
  row["apart"] = c.simulation.cost();
  row["bubble"] = c.simulation.bubble_rate();
  row["zero_bubble_rate"] = c.simulation.zero_bubble_rate();
  row["memory"] = c.memory;
  return row;
}

Register plan_part([](py::module_& m) {
  py::class_<PipelinePlan>(m, "Plan", "Cut, ranks, table and recomputation of a pipeline.")
      .def_readonly("cut", &PipelinePlan::cut)
      .def_readonly("schedule", &PipelinePlan::schedule)
      .def_readonly("recompute", &PipelinePlan::recompute)
      .def_readonly("transmit", &PipelinePlan::transmit)
      .def_readonly("replicas", &PipelinePlan::replicas)
      .def_readonly("operators", &PipelinePlan::operators)
      .def_readonly("seconds", &PipelinePlan::seconds)
      .def_readonly("memory", &PipelinePlan::memory)
      .def("json", [](const PipelinePlan& plan) { return to_json(plan); })
      .def("save",
           [](const PipelinePlan& plan, const std::string& path) { write_file_atomically(path, to_json(plan)); })
      .def(py::pickle([](const PipelinePlan& plan) { return to_json(plan); },
                      [](const std::string& text) { return parse_plan(text, "a pickled plan"); }));
  m.def("read_plan", &read_plan, py::arg("path"));
  m.def("check_plan_fits", &check_plan_fits, py::arg("operators"), py::arg("module"));
  py::class_<PythonPlanned>(m, "PlannedModel", "Every schedule that was compared for a model.")
      .def_property_readonly("rows",
                             [](const PythonPlanned& p) {
                               py::list rows;
                               for (const ScheduleChoice& c : p.planned.choices) rows.append(row_of(c));
                               return rows;
                             })
      .def_property_readonly("spread", [](const PythonPlanned& p) { return p.planned.spread; })
      .def("conclusion", [](const PythonPlanned& p,
                            const std::string& name) { return conclusion(p.planned, p.planned.choose(name)); })
      .def("plan",
           [](const PythonPlanned& p, const std::string& name) {
             return p.planned.plan_of(*p.module, p.planned.choose(name), p.replicas);
           })
      .def("page", [](const PythonPlanned& p, const std::string& name, const std::string& model,
                      const std::string& path) { plan_page(p.planned, p.planned.choose(name), model).write(path); });
  m.def(
      "plan_model",
      [](std::shared_ptr<GraphModule> module, std::optional<std::vector<c10::IValue>> inputs, int ranks,
         int microbatches, int replicas, std::optional<double> memory, const py::object& loss,
         std::pair<double, double> link, std::vector<int> stages_per_rank, std::vector<std::string> names,
         std::vector<std::string> transmit, bool estimate, int tables) {
        PlanRequest request{.ranks = ranks,
                            .microbatches = microbatches,
                            .replicas = replicas,
                            .stages_per_rank = std::move(stages_per_rank),
                            .names = std::move(names),
                            .transmit = std::move(transmit),
                            .estimate = estimate};
        if (tables > 0) request.tables = tables;
        return plan(std::move(module), std::move(inputs), std::move(request), memory, loss, link.first, link.second);
      },
      py::arg("module"), py::arg("inputs"), py::kw_only(), py::arg("ranks"), py::arg("microbatches"),
      py::arg("replicas"), py::arg("memory"), py::arg("loss"), py::arg("link"), py::arg("stages_per_rank"),
      py::arg("names"), py::arg("transmit"), py::arg("estimate"), py::arg("tables"));
});

}  // namespace
}  // namespace plumb::python
