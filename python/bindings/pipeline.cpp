// Stages at work: the runtime over Python stages and torch's process groups.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>

#include "convert.h"
#include "costs.h"
#include "errors.h"
#include "module.h"
#include "plumb/analysis/adapters.h"
#include "plumb/core/error.h"
#include "plumb/pipeline/graph_stage.h"
#include "plumb/pipeline/group_state.h"
#include "plumb/pipeline/runtime.h"
#include "tensors.h"

namespace plumb::python {
namespace {

// Python's exceptions must not travel through code without the GIL.
template <typename F>
auto guarded(const F& f) {
  try {
    return f();
  } catch (const py::error_already_set& error) {
    throw to_error(error);
  }
}

// A stage whose work is done in Python: an object with run(inputs, microbatch, sizes), parameters(), and weight_work()
// or None.
class PyStage : public StageFunction {
 public:
  explicit PyStage(const py::object& stage)
      : stage_(stage),
        run_(stage.attr("run")),
        parameters_(stage.attr("parameters")),
        weight_work_(stage.attr("weight_work")) {
    own_work_ = !weight_work_.is_none();
    recompute = parse_recompute(py::getattr(stage, "recompute", py::str("cheap")).cast<std::string>());
  }
  ~PyStage() override {
    py::gil_scoped_acquire gil;
    stage_ = run_ = parameters_ = weight_work_ = py::object();
  }

  Tensors forward(const Tensors& inputs) override { return run(inputs, {}); }

  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override {
    py::gil_scoped_acquire gil;
    return guarded([&] {
      py::dict sizes;
      for (const auto& [input, own] : microbatch.sizes) sizes[py::int_(input)] = py::tuple(py::cast(own));
      return to_tensors(run_(to_list(inputs), microbatch.index, sizes).cast<py::sequence>());
    });
  }

  std::vector<NamedTensor> parameters() const override {
    py::gil_scoped_acquire gil;
    return guarded([&] {
      std::vector<NamedTensor> named;
      for (py::handle pair : parameters_()) {
        const auto tuple = py::reinterpret_borrow<py::tuple>(pair);
        named.push_back({tuple[0].cast<std::string>(), to_tensor(tuple[1])});
      }
      return named;
    });
  }

  std::optional<at::Device> device() const override {
    py::gil_scoped_acquire gil;
    return guarded([&] { return at::Device(py::str(stage_.attr("device")).cast<std::string>()); });
  }

  bool has_own_weight_work() const override { return own_work_; }
  std::function<void()> own_weight_work() override {
    py::gil_scoped_acquire gil;
    return guarded([&]() -> std::function<void()> {
      // The last copy may be let go without the GIL.
      std::shared_ptr<py::object> work(new py::object(weight_work_()), [](py::object* object) {
        py::gil_scoped_acquire gil;
        delete object;
      });
      return [work] {
        py::gil_scoped_acquire gil;
        guarded([&] { return (*work)().is_none(); });
      };
    });
  }

 private:
  py::object stage_, run_, parameters_, weight_work_;
  bool own_work_ = false;
};

// Transports of one backend share a state: each has its own range of tags, and what failed stays failed. How many
// ranges were handed out is kept as long as the backend lives, as ranks may let go of their pipelines at different
// times.
ProcessGroup shared_group(const py::object& group, double timeout_seconds) {
  if (group.is_none()) return {};
  auto& process_group = group.cast<c10d::ProcessGroup&>();
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000));
  ProcessGroup fresh = use_group(c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&process_group),
                                 nullptr, timeout);
  struct Known {
    c10::weak_intrusive_ptr<c10d::Backend> backend;
    std::weak_ptr<ProcessGroup::State> state;
    std::shared_ptr<int> tag_ranges;
  };
  static auto& known = *new std::map<c10d::Backend*, Known>();
  auto& backend = fresh.state().backend;
  auto it = known.find(backend.get());
  if (it != known.end() && it->second.backend.expired()) it = known.erase(it);
  if (it == known.end()) {
    it = known.emplace(backend.get(), Known{c10::weak_intrusive_ptr<c10d::Backend>(backend), {}, nullptr}).first;
    it->second.tag_ranges = std::make_shared<int>(0);
  }
  auto state = it->second.state.lock();
  if (!state) {
    // The state's end writes down how many ranges it handed out. Buffers of a failed step stay with Gloo for good.
    auto count = it->second.tag_ranges;
    state = std::shared_ptr<ProcessGroup::State>(new ProcessGroup::State(fresh.state()), [count](auto* s) {
      *count = s->tag_ranges;
      if (!s->failed) delete s;
    });
    state->tag_ranges = *count;
    // Messages name ranks by their numbers among all processes.
    const auto distributed = py::module_::import("torch.distributed");
    state->world = distributed.attr("get_process_group_ranks")(group).cast<std::vector<int>>();
    it->second.state = state;
  }
  state->timeout = timeout;
  return ProcessGroup(state);
}

PipelineLayout make_layout(const std::vector<std::pair<std::vector<std::pair<int, int>>, int>>& stages, int num_inputs,
                           const std::vector<std::vector<std::pair<int, std::string>>>& tied) {
  PipelineLayout layout;
  layout.num_inputs = num_inputs;
  for (const auto& [inputs, num_outputs] : stages) {
    StageLayout stage;
    for (const auto& [from, index] : inputs) stage.inputs.push_back({from, index});
    stage.num_outputs = num_outputs;
    layout.stages.push_back(std::move(stage));
  }
  for (const auto& group : tied) {
    TiedParameter parameter;
    for (const auto& [stage, name] : group) parameter.copies.push_back({stage, name});
    layout.tied.push_back(std::move(parameter));
  }
  layout.check();
  return layout;
}

py::list events_to_python(const std::vector<TimelineEvent>& events) {
  py::list list;
  for (const auto& e : events)
    list.append(py::make_tuple(e.rank, to_string(e.action), e.waiting, e.start, e.end, e.sent));
  return list;
}

ActionKind parse_kind(const std::string& text) {
  if (text == "OVERLAP_F_B") return ActionKind::Overlap;
  for (const auto kind :
       {ActionKind::Forward, ActionKind::FullBackward, ActionKind::BackwardInput, ActionKind::BackwardWeight,
        ActionKind::Unshard, ActionKind::Reshard, ActionKind::ReduceGrad}) {
    if (to_string(kind) == text) return kind;
  }
  throw Error(ErrorKind::InvalidArgument, "no function can stand in the place of actions of kind '" + text + "'");
}

// A Python function called with the action's text.
ActionHook make_hook(const py::object& function) {
  std::shared_ptr<py::object> held(new py::object(function), [](py::object* object) {
    py::gil_scoped_acquire gil;
    delete object;
  });
  return [held](const Action& action, StepDriver&) {
    py::gil_scoped_acquire gil;
    guarded([&] { return (*held)(to_string(action)).is_none(); });
  };
}

using Hooks = std::map<std::pair<std::string, int>, py::object>;  // by kind and stage, -1: every stage

class PyPipeline {
 public:
  PyPipeline(const PipelineLayout& layout, const Schedule& schedule, const std::map<int, py::object>& stages,
             const py::object& group, double timeout, bool scale_grads, bool record_timeline, bool check_numerics,
             std::optional<std::uint64_t> seed, const py::object& replicas, const Hooks& hooks, std::int64_t first_step,
             int gradient_groups) {
    PipelineOptions options;
    for (const auto& [point, function] : hooks)
      options.hooks[{parse_kind(point.first), point.second}] = make_hook(function);
    options.replicas = shared_group(replicas, timeout);
    options.average_replicas = true;
    options.scale_grads = scale_grads;
    options.return_outputs = false;  // the stages keep them
    options.record_timeline = record_timeline;
    options.check_numerics = check_numerics;
    options.seed = seed;
    options.gradient_groups = gradient_groups;
    std::map<int, std::shared_ptr<StageFunction>> functions;
    for (const auto& [index, stage] : stages) functions[index] = std::make_shared<PyStage>(stage);
    auto ranks = shared_group(group, timeout);
    py::gil_scoped_release free;
    pipeline_ = std::make_unique<Pipeline>(layout, schedule, std::move(functions), std::move(ranks), options);
    pipeline_->set_step(first_step);
  }

  py::object run(const py::sequence& inputs, const std::vector<int64_t>& rows, bool train) {
    std::vector<Tensors> by_microbatch;
    for (py::handle h : inputs) by_microbatch.push_back(to_tensors(py::reinterpret_borrow<py::sequence>(h)));
    StepResult result;
    {
      py::gil_scoped_release free;
      result = train ? pipeline_->step_microbatches(by_microbatch, {}, rows)
                     : pipeline_->eval_microbatches(by_microbatch, {}, rows);
    }
    return events_to_python(result.timeline);
  }

  // Of a stage: {operator: (results, bytes)} of one microbatch.
  py::dict recomputed(int stage) const {
    py::dict operators;
    for (const auto& [name, entry] : pipeline_->recomputed(stage).by_operator)
      operators[py::str(name)] = py::make_tuple(entry.tensors, entry.bytes);
    return operators;
  }

  StepDriver driver() { return pipeline_->driver(); }

  py::object gather_timeline() {
    std::vector<TimelineEvent> events;
    {
      py::gil_scoped_release free;
      events = pipeline_->gather_timeline();
    }
    start_at_zero(events);
    return events_to_python(events);
  }

 private:
  std::unique_ptr<Pipeline> pipeline_;
};

std::vector<TimelineEvent> to_events(const py::sequence& list) {
  std::vector<TimelineEvent> events;
  for (py::handle h : list) {
    const auto t = py::reinterpret_borrow<py::tuple>(h);
    events.push_back({t[0].cast<int>(), parse_action(t[1].cast<std::string>()), t[2].cast<double>(),
                      t[3].cast<double>(), t[4].cast<double>(), t.size() > 5 ? t[5].cast<std::int64_t>() : 0});
  }
  return events;
}

using FreeGil = py::call_guard<py::gil_scoped_release>;

void bind_stages(py::module_& m) {
  py::class_<PipelineLayout>(m, "PipelineLayout", "What flows between the stages of a pipeline.")
      // stages: ([(stage or -1 for the model's inputs, index), ...], number of outputs); tied: [[(stage, name), ...],
      // ...]
      .def(py::init(&make_layout), py::arg("stages"), py::arg("num_inputs") = 1,
           py::arg("tied") = std::vector<std::vector<std::pair<int, std::string>>>())
      .def_static(
          "dynamic_chain",
          [](int num_stages, const std::pair<std::string, std::string>& wire) {
            auto layout = PipelineLayout::dynamic_chain(num_stages);
            layout.wire = {wire.first, wire.second};
            layout.check();
            return layout;
          },
          py::arg("num_stages"), py::arg("wire") = std::pair<std::string, std::string>{})
      .def_static("of", py::overload_cast<const PipeTable&>(&plumb::make_layout), py::arg("table"))
      .def_property_readonly("num_stages", &PipelineLayout::num_stages)
      .def_readonly("num_inputs", &PipelineLayout::num_inputs)
      .def_readonly("dynamic_outputs", &PipelineLayout::dynamic_outputs)
      .def("__str__", &PipelineLayout::text);
  py::class_<GraphStage>(m, "GraphStage",
                         "A stage of a cut graph, with its graphs for other sizes than it was cut for.")
      .def(py::init<std::shared_ptr<GraphModule>, const PipeTable&, int, std::shared_ptr<StageSpecializer>,
                    std::string>(),
           py::arg("module"), py::arg("table"), py::arg("index"), py::arg("specializer"), py::arg("remedy"))
      .def("sizes_by_hand", [](const GraphStage& stage, const py::list& values,
                               const ModelSizes& told) { return stage.sizes_by_hand(to_ivalues(values), told); })
      .def("run",
           [](GraphStage& stage, const py::list& inputs, const ModelSizes& sizes) {
             auto values = to_ivalues(inputs);
             {
               py::gil_scoped_release release;
               values = stage.run_values(std::move(values), sizes);
             }
             return to_list(values);
           })
      .def("forget_sizes", &GraphStage::forget_sizes);
}

Register pipeline_part([](py::module_& m) {
  bind_stages(m);
  py::class_<StepDriver>(m, "StepDriver",
                         "The parts of actions: of the step that a pipeline runs, or of one stage by hand.")
      .def(py::init([](const PipelineLayout& layout, int index, const py::object& stage) {
        return StepDriver(layout, index, std::make_shared<PyStage>(stage));
      }))
      .def("forward", &StepDriver::forward, py::arg("stage"), py::arg("microbatch"), FreeGil())
      .def(
          "backward",
          [](StepDriver& driver, const std::string& kind, int stage, int microbatch, const py::object& loss) {
            const auto parsed = parse_kind(kind);
            const auto root = to_tensor(loss);
            py::gil_scoped_release free;
            driver.backward(parsed, stage, microbatch, root);
          },
          py::arg("kind"), py::arg("stage"), py::arg("microbatch"), py::arg("loss") = py::none())
      .def("set_loss", [](StepDriver& driver, int m, const at::Tensor& loss) { driver.set_loss(m, loss); })
      .def("take_outputs",
           [](StepDriver& driver, int stage, int m, int from, const py::sequence& values, const ModelSizes& sizes) {
             driver.take_outputs(stage, m, from, to_tensors(values), sizes);
           })
      .def("take_gradients",
           [](StepDriver& driver, int stage, int m, int from, const py::sequence& values) {
             driver.take_gradients(stage, m, from, to_tensors(values));
           })
      .def("take_model_inputs",
           [](StepDriver& driver, int stage, int m, const py::sequence& values) {
             driver.take_model_inputs(stage, m, to_tensors(values));
           })
      .def("input_gradients", [](const StepDriver& driver, int stage, int m, int to) {
        return to_list(driver.input_gradients(stage, m, to));
      });
  py::class_<PyPipeline>(m, "Pipeline", "Runs a rank's part of a schedule over Python stages.")
      .def(py::init<const PipelineLayout&, const Schedule&, const std::map<int, py::object>&, const py::object&, double,
                    bool, bool, bool, std::optional<std::uint64_t>, const py::object&, const Hooks&, std::int64_t,
                    int>(),
           py::arg("layout"), py::arg("schedule"), py::arg("stages"), py::arg("group") = py::none(),
           py::arg("timeout") = 60.0, py::arg("scale_grads") = true, py::arg("record_timeline") = false,
           py::arg("check_numerics") = false, py::arg("seed") = py::none(), py::arg("replicas") = py::none(),
           py::arg("hooks") = Hooks(), py::arg("first_step") = 0, py::arg("gradient_groups") = 0)
      .def("run", &PyPipeline::run)
      .def("driver", &PyPipeline::driver, py::keep_alive<0, 1>())
      .def("recomputed", &PyPipeline::recomputed, py::arg("stage"))
      .def("gather_timeline", &PyPipeline::gather_timeline);
  // What was recorded as a picture, and below it the table as simulated with costs in seconds, if there are any.
  m.def("timeline_svg", [](const py::sequence& events, const Schedule& schedule, const py::dict& costs) {
    TimelineChart chart;
    chart.title = schedule.name;
    chart.runs.push_back(timeline_of(to_events(events)));
    if (!costs.empty())
      chart.runs.push_back(timeline_of(schedule, simulate_schedule(schedule, to_costs(costs)), "simulated", "s"));
    return to_svg(chart);
  });
  m.def("timeline_trace",
        [](const py::sequence& events) { return to_trace({timeline_of(to_events(events), "step")}); });
  m.def("measured_bubble", [](const py::sequence& events) { return measured_bubble(to_events(events)); });
});

}  // namespace
}  // namespace plumb::python
