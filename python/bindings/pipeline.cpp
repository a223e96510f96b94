// Stages at work: the runtime over Python stages and torch's process groups.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>

#include "costs.h"
#include "errors.h"
#include "module.h"
#include "plumb/analysis/adapters.h"
#include "plumb/operators/dispatch_keys.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/runtime.h"

namespace plumb::python {
namespace {

// f() under the GIL for a stage of Python's, which notes an Exception: it becomes the cause of the step's error.
// Signals are looked for here, as Python does so only while its own code runs.
template <typename F>
auto in_stage(const std::shared_ptr<py::object>& stage, const F& f) {
  return with_gil([&] {
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      return f();
    } catch (const py::error_already_set& error) {
      if (error.matches(PyExc_Exception)) stage->attr("note")(error.value());
      throw;
    }
  });
}

std::vector<NamedTensor> named(const py::object& pairs) {
  std::vector<NamedTensor> tensors;
  for (auto& [name, tensor] : pairs.cast<std::vector<std::pair<std::string, at::Tensor>>>())
    tensors.push_back({std::move(name), std::move(tensor)});
  return tensors;
}

// A stage of Python's: plumb.pipelining._chunks.EngineStage. Its forward is a GraphStage if Python has no part in it,
// and its run() otherwise.
class PyStage : public StageFunction {
 public:
  explicit PyStage(const py::object& stage)
      : stage_(held(stage)),
        own_work_(!stage.attr("weight_work").is_none()),
        is_last_(stage.attr("is_last").cast<bool>()) {
    recompute = parse_recompute(py::getattr(stage, "recompute", py::str("cheap")).cast<std::string>());
  }

  Tensors forward(const Tensors& inputs) override { return run(inputs, {}); }

  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override {
    const auto graph = in_stage(stage_, [&] { return stage_->attr("graph").cast<std::shared_ptr<GraphStage>>(); });
    if (!graph) {
      return in_stage(stage_, [&] {
        py::dict sizes;
        for (const auto& [input, own] : microbatch.sizes) sizes[py::int_(input)] = py::tuple(py::cast(own));
        return stage_->attr("run")(inputs, microbatch.index, sizes).cast<Tensors>();
      });
    }
    Tensors values;
    for (const c10::IValue& v : graph->run_values({inputs.begin(), inputs.end()}, microbatch.sizes))
      values.push_back(v.isTensor() ? v.toTensor() : at::Tensor());
    if (!is_last_) return values;
    return in_stage(stage_, [&] { return stage_->attr("finish")(values, microbatch.index).cast<Tensors>(); });
  }

  std::vector<NamedTensor> parameters() const override {
    return in_stage(stage_, [&] { return named(stage_->attr("parameters")()); });
  }

  std::vector<NamedTensor> written_state() const override {
    return in_stage(stage_, [&] { return named(stage_->attr("written_state")()); });
  }

  const Graph* graph() const override {
    return in_stage(stage_, [&] {
      const auto graph = stage_->attr("graph").cast<std::shared_ptr<GraphStage>>();
      return graph ? graph->graph() : nullptr;
    });
  }

  std::optional<at::Device> device() const override {
    return in_stage(stage_, [&] { return stage_->attr("device").cast<at::Device>(); });
  }

  bool has_own_weight_work() const override { return own_work_; }
  std::function<void()> own_weight_work() override {
    const auto work = in_stage(stage_, [&] { return held(stage_->attr("weight_work")()); });
    return [stage = stage_, work] { in_stage(stage, [&] { return (*work)(); }); };
  }

 private:
  std::shared_ptr<py::object> stage_;
  bool own_work_, is_last_;
};

ProcessGroup shared_group(const py::object& group, double timeout_seconds) {
  if (group.is_none()) return {};
  auto& process_group = group.cast<c10d::ProcessGroup&>();
  // Messages name ranks by their numbers among all processes.
  const auto distributed = py::module_::import("torch.distributed");
  return share_group(c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&process_group),
                     distributed.attr("get_process_group_ranks")(group).cast<std::vector<int>>(),
                     std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000)));
}

ActionKind parse_kind(const std::string& text) {
  for (const auto kind :
       {ActionKind::Forward, ActionKind::FullBackward, ActionKind::BackwardInput, ActionKind::BackwardWeight,
        ActionKind::Unshard, ActionKind::Reshard, ActionKind::ReduceGrad, ActionKind::Overlap}) {
    if (to_string(kind) == text) return kind;
  }
  throw Error(ErrorKind::InvalidArgument, "no function can stand in the place of actions of kind '" + text + "'");
}

using Hooks = std::map<std::pair<std::string, int>, py::object>;  // by kind and stage, -1: every stage

std::unique_ptr<Pipeline> make_pipeline(const PipeTable& layout, const Schedule& schedule,
                                        const std::map<int, py::object>& stages, const py::object& group,
                                        double timeout, bool scale_grads, bool record_timeline, bool check_numerics,
                                        std::optional<std::uint64_t> seed, const py::object& replicas,
                                        const Hooks& hooks, std::int64_t first_step, int gradient_groups) {
  PipelineOptions options;
  for (const auto& [point, function] : hooks) {
    options.hooks[{parse_kind(point.first), point.second}] =
        [call = held(function)](const Action& action, StepDriver&) { with_gil([&] { (*call)(to_string(action)); }); };
  }
  options.replicas = shared_group(replicas, timeout);
  options.average_replicas = true;
  options.scale_grads = scale_grads;
  options.scale_input_grads = false;
  options.return_outputs = false;  // the stages keep them
  options.record_timeline = record_timeline;
  options.check_numerics = check_numerics;
  options.seed = seed;
  options.gradient_groups = gradient_groups;
  std::map<int, std::shared_ptr<StageFunction>> functions;
  for (const auto& [index, stage] : stages) functions[index] = std::make_shared<PyStage>(stage);
  auto ranks = shared_group(group, timeout);
  py::gil_scoped_release free;
  auto pipeline = std::make_unique<Pipeline>(layout, schedule, std::move(functions), std::move(ranks), options);
  pipeline->set_step(first_step);
  return pipeline;
}

// (rank, action, waiting, start, end, bytes sent)
using Event = std::tuple<int, std::string, double, double, double, std::int64_t>;

std::vector<Event> gather_timeline(Pipeline& pipeline) {
  std::vector<TimelineEvent> events = pipeline.gather_timeline();
  start_at_zero(events);
  std::vector<Event> all;
  for (const auto& e : events) all.emplace_back(e.rank, to_string(e.action), e.waiting, e.start, e.end, e.sent);
  return all;
}

std::vector<TimelineEvent> to_events(const std::vector<Event>& all) {
  std::vector<TimelineEvent> events;
  for (const auto& [rank, action, waiting, start, end, sent] : all)
    events.push_back({rank, parse_action(action), waiting, start, end, sent});
  return events;
}

void bind_stages(py::module_& m) {
  py::class_<GraphStage, std::shared_ptr<GraphStage>>(
      m, "GraphStage", "A stage of a cut graph, with its graphs for other sizes than it was cut for.")
      .def(py::init<std::shared_ptr<GraphModule>, const PipeTable&, int, std::shared_ptr<StageSpecializer>, std::string,
                    bool>(),
           py::arg("module"), py::arg("table"), py::arg("index"), py::arg("specializer"), py::arg("remedy"),
           py::arg("variant") = false)
      .def("written_state",
           [](const GraphStage& stage) {
             std::vector<std::pair<std::string, at::Tensor>> pairs;
             for (const NamedTensor& each : stage.written_state()) pairs.emplace_back(each.name, each.tensor);
             return pairs;
           })
      .def("graph_for", &GraphStage::graph_for, FreeGil(), py::arg("sizes"))
      .def("run_by_hand", &GraphStage::run_by_hand, FreeGil(), py::arg("inputs"), py::arg("sizes"))
      .def("run", &GraphStage::run_values, FreeGil(), py::arg("inputs"), py::arg("sizes"));
}

Register pipeline_part([](py::module_& m) {
  bind_stages(m);
  py::class_<StepDriver>(m, "StepDriver",
                         "The parts of actions: of the step that a pipeline runs, or of one stage by hand.")
      .def(py::init([](const PipeTable& layout, int index, const py::object& stage) {
             return StepDriver(layout, index, std::make_shared<PyStage>(stage));
           }),
           py::arg("layout"), py::arg("index"), py::arg("stage"))
      .def("forward", &StepDriver::forward, py::arg("stage"), py::arg("microbatch"), FreeGil())
      .def(
          "backward",
          [](StepDriver& driver, const std::string& kind, int stage, int microbatch, std::optional<at::Tensor> loss) {
            driver.backward(parse_kind(kind), stage, microbatch, loss.value_or(at::Tensor()));
          },
          py::arg("kind"), py::arg("stage"), py::arg("microbatch"), py::arg("loss") = py::none(), FreeGil())
      .def("set_loss", &StepDriver::set_loss, py::arg("microbatch"), py::arg("loss"))
      .def("take_outputs", &StepDriver::take_outputs, py::arg("stage"), py::arg("microbatch"), py::arg("source"),
           py::arg("outputs"), py::arg("sizes"))
      .def("take_gradients", &StepDriver::take_gradients, py::arg("stage"), py::arg("microbatch"), py::arg("source"),
           py::arg("gradients"))
      .def("take_model_inputs", &StepDriver::take_model_inputs, py::arg("stage"), py::arg("microbatch"),
           py::arg("inputs"))
      .def("input_gradients", &StepDriver::input_gradients, py::arg("stage"), py::arg("microbatch"), py::arg("to"));
  py::class_<Pipeline>(m, "Pipeline", "Runs a rank's part of a schedule over Python stages.")
      .def(py::init(&make_pipeline), py::arg("layout"), py::arg("schedule"), py::arg("stages"),
           py::arg("group") = py::none(), py::arg("timeout") = 60.0, py::arg("scale_grads") = true,
           py::arg("record_timeline") = false, py::arg("check_numerics") = false, py::arg("seed") = py::none(),
           py::arg("replicas") = py::none(), py::arg("hooks") = Hooks(), py::arg("first_step") = 0,
           py::arg("gradient_groups") = 0)
      .def(
          "run",
          [](Pipeline& pipeline, const std::vector<Tensors>& inputs, const std::vector<int64_t>& rows, bool train) {
            return (train ? pipeline.step_microbatches(inputs, {}, rows) : pipeline.eval_microbatches(inputs, {}, rows))
                .input_grads;
          },
          FreeGil(), py::arg("inputs"), py::arg("rows"), py::arg("train"))
      .def("driver", &Pipeline::driver, py::keep_alive<0, 1>())
      // {operator: (results, bytes)} of one microbatch.
      .def(
          "recomputed",
          [](const Pipeline& pipeline, int stage) {
            std::map<std::string, std::pair<int64_t, int64_t>> operators;
            for (const auto& [name, entry] : pipeline.recomputed(stage).by_operator)
              operators[name] = {entry.tensors, entry.bytes};
            return operators;
          },
          py::arg("stage"))
      .def("gather_timeline", &gather_timeline, FreeGil());
  m.attr("recompute_key") = c10::toString(kRecomputeKey);
  // Draws the recorded events, and below them the table as simulated with costs in seconds, if there are any.
  m.def(
      "timeline_svg",
      [](const std::vector<Event>& events, const Schedule& schedule, const py::dict& costs) {
        TimelineChart chart;
        chart.title = schedule.name;
        chart.runs.push_back(timeline_of(to_events(events)));
        if (!costs.empty())
          chart.runs.push_back(timeline_of(schedule, simulate_schedule(schedule, to_costs(costs)), "simulated", "s"));
        return to_svg(chart);
      },
      py::arg("events"), py::arg("table"), py::arg("costs"));
  m.def(
      "timeline_trace",
      [](const std::vector<Event>& events) { return to_trace({timeline_of(to_events(events), "step")}); },
      py::arg("events"));
  m.def(
      "measured_bubble", [](const std::vector<Event>& events) { return measured_bubble(to_events(events)); },
      py::arg("events"));
});

}  // namespace
}  // namespace plumb::python
