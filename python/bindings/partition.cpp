// Cutting graphs into stages: Pipe and what is known of its stages, balanced cuts, stages as bytes.
#include "errors.h"
#include "module.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/describe_cut.h"
#include "plumb/partition/move.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/partition/size_policy.h"
#include "plumb/partition/split.h"
#include "plumb/partition/stage_bytes.h"
#include "plumb/partition/stage_specializer.h"
#include "report.h"

namespace plumb::python {
namespace {

// A loss spec: bools in tuples, lists and dicts.
c10::IValue loss_spec(py::handle h) {
  if (py::isinstance<py::bool_>(h)) return h.cast<bool>();
  if (py::isinstance<py::tuple>(h) || py::isinstance<py::list>(h)) {
    std::vector<c10::IValue> parts;
    for (py::handle e : h) parts.push_back(loss_spec(e));
    return c10::ivalue::Tuple::create(std::move(parts));
  }
  if (py::isinstance<py::dict>(h)) {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    for (const auto& [key, value] : h.cast<py::dict>()) dict.insert(py::str(key).cast<std::string>(), loss_spec(value));
    return dict;
  }
  throw Error(ErrorKind::StructureMismatch,
              "a " + py::str(py::type::of(h).attr("__name__")).cast<std::string>() + " is no part of a loss spec", "",
              "give the structure of the outputs, with True for the loss and False elsewhere");
}

std::shared_ptr<Pipe> cut(const GraphModule& module, const std::optional<std::vector<std::string>>& before_values,
                          const std::vector<std::pair<std::string, bool>>& modules,
                          const std::vector<size_t>& before_ops, const std::optional<py::function>& policy,
                          bool transmit, const std::map<std::string, bool>& transmit_by_name, bool move_cuts,
                          const py::object& loss, const std::pair<std::string, std::string>& wire,
                          const std::vector<std::string>& wire_exclude) {
  SplitOptions options;
  for (const auto& [path, end] : modules)
    options.points.emplace_back(path, end ? SplitPoint::End : SplitPoint::Beginning);
  options.cut_before = before_ops;
  if (policy) {
    options.policy = [&policy](const Node& node) {
      return (*policy)(py::cast(const_cast<Node*>(&node), py::return_value_policy::reference)).cast<int>();
    };
  }
  options.multi_use = transmit ? MultiUse::Transmit : MultiUse::Replicate;
  for (const auto& [name, send] : transmit_by_name)
    options.multi_use_by_name[name] = send ? MultiUse::Transmit : MultiUse::Replicate;
  options.at_conflict = move_cuts ? AtConflict::MoveCut : AtConflict::Refuse;
  if (!loss.is_none()) options.loss_spec = loss_spec(loss);
  options.wire = {{wire.first, wire.second}, wire_exclude};
  return before_values ? pipeline(*mark_before(module, *before_values), options) : pipeline(module, options);
}

py::tuple balance_cuts(const GraphModule& module, int stages, const std::optional<std::vector<c10::IValue>>& inputs,
                       int repeats, double seconds_per_message, double bytes_per_second,
                       const std::vector<int64_t>& memory_limits, double bytes_per_parameter_byte) {
  const BalanceOptions options{.stages = stages,
                               .seconds_per_message = seconds_per_message,
                               .bytes_per_second = bytes_per_second,
                               .memory_limits = memory_limits,
                               .bytes_per_parameter_byte = bytes_per_parameter_byte};
  Balance found;
  {
    py::gil_scoped_release release;  // measuring runs autograd
    const auto values = inputs.value_or(std::vector<c10::IValue>());
    found = balance(
        module, inputs && repeats > 0 ? measure_cost(module, values, repeats) : estimate_cost(module, values), options);
  }
  py::list rows;
  for (const BalancedStage& s : found.stages) {
    rows.append(py::dict("first_node"_a = s.first_node, "num_ops"_a = s.num_ops, "forward"_a = s.forward,
                         "backward"_a = s.backward, "communication"_a = s.communication,
                         "parameter_bytes"_a = s.parameter_bytes, "activation_bytes"_a = s.activation_bytes,
                         "memory"_a = s.memory, "bytes_in"_a = s.bytes_in, "bytes_out"_a = s.bytes_out));
  }
  return py::make_tuple(found.options.cut_before, rows, found.report());
}

// `cut` returns a Pipe for flat inputs, or None once the model is gone.
std::shared_ptr<StageSpecializer> make_specializer(const Pipe& pipe, std::vector<c10::IValue> example, py::function cut,
                                                   bool same_names) {
  auto again = [cut = held(std::move(cut))](const std::vector<c10::IValue>& inputs) {
    return with_gil([&] { return (*cut)(inputs).cast<std::shared_ptr<Pipe>>(); });
  };
  return std::make_shared<StageSpecializer>(pipe, std::move(example), std::move(again), same_names);
}

void bind_specializer(py::module_& m) {
  py::class_<StageSpecializer, std::shared_ptr<StageSpecializer>>(
      m, "StageSpecializer", "Graphs of stages for other sizes than a model was cut for.")
      .def(py::init(&make_specializer), py::arg("pipe"), py::arg("example"), py::arg("cut"), py::arg("same_names"))
      .def_property_readonly("captures", &StageSpecializer::captures)
      // Copying returns the same object. A pickled one comes without its model.
      .def("__copy__", [](const py::object& self) { return self; })
      .def("__deepcopy__", [](const py::object& self, const py::object&) { return self; })
      .def("__reduce__", [](const py::object&) { return py::make_tuple(py::type::of(py::none()), py::tuple()); });
}

// stages: ([(stage or -1 for the model's inputs, index), ...], number of outputs)
std::shared_ptr<PipeTable> make_table(const std::vector<std::pair<std::vector<std::pair<int, int>>, int>>& stages,
                                      size_t num_inputs) {
  auto table = std::make_shared<PipeTable>();
  table->num_inputs = num_inputs;
  for (const auto& [inputs, num_outputs] : stages) {
    StageIO& stage = table->stages.emplace_back();
    for (const auto& [from, index] : inputs) stage.inputs.push_back({{from, static_cast<size_t>(index)}});
    stage.outputs.resize(num_outputs);
  }
  table->check();
  return table;
}

void bind_pipe_table(py::module_& m) {
  py::class_<PipeTable, std::shared_ptr<PipeTable>>(m, "PipeTable",
                                                    "Table of the values that flow between the stages of a pipeline.")
      .def(py::init(&make_table), py::arg("stages"), py::arg("num_inputs") = 1)
      .def_static(
          "dynamic_chain",
          [](int num_stages, const std::pair<std::string, std::string>& wire) {
            auto table = std::make_shared<PipeTable>(PipeTable::dynamic_chain(num_stages));
            table->wire = {wire.first, wire.second};
            table->check();
            return table;
          },
          py::arg("num_stages"), py::arg("wire") = std::pair<std::string, std::string>{})
      .def_property_readonly("num_stages", &PipeTable::num_stages)
      .def_readonly("loss_output", &PipeTable::loss_output)
      .def_readonly("replicated", &PipeTable::replicated, "one dict a parameter: stage -> its name there")
      .def(
          "inputs",
          [](const PipeTable& t, size_t stage) {
            py::list ports;
            for (const StageInputPort& p : t.stages.at(stage).inputs) {
              ports.append(py::dict("name"_a = p.name, "stage"_a = p.source.stage, "index"_a = p.source.index,
                                    "is_tensor"_a = p.type == ValueType::Tensor, "meta"_a = to_python(p.meta),
                                    "written"_a = p.written));
            }
            return ports;
          },
          "name, where it comes from (stage -1: input `index` of the whole), meta, whether the stage writes it",
          py::arg("stage"))
      .def(
          "outputs",
          [](const PipeTable& t, size_t stage) {
            py::list ports;
            for (const StageOutputPort& p : t.stages.at(stage).outputs) {
              std::vector<std::pair<int, size_t>> consumers;
              for (const PortUse& use : p.consumers) consumers.emplace_back(use.stage, use.input);
              ports.append(py::dict("name"_a = p.name, "is_tensor"_a = p.type == ValueType::Tensor,
                                    "meta"_a = to_python(p.meta), "consumers"_a = consumers,
                                    "pipeline_output"_a = p.pipeline_output));
            }
            return ports;
          },
          "name, meta, consumers (stage, input), and which output of the whole it is", py::arg("stage"))
      .def_property_readonly("outputs_of_whole",
                             [](const PipeTable& t) {
                               std::vector<std::pair<std::optional<size_t>, c10::IValue>> outputs;
                               for (const PipelineOutput& o : t.outputs) outputs.emplace_back(o.port, o.constant);
                               return outputs;
                             })
      .def("wire_report", [](const PipeTable& t) { return to_python(wire_report(t)); })
      .def("to_json", &PipeTable::to_json)
      .def(py::pickle([](const PipeTable& table) { return table.to_json(); },
                      [](const std::string& text) { return std::make_shared<PipeTable>(PipeTable::from_json(text)); }))
      .def("__str__", &PipeTable::to_string);
}

void bind_pipe(py::module_& m) {
  py::class_<Pipe, std::shared_ptr<Pipe>>(m, "Pipe", "A graph cut into stages: plumb.pipelining.Pipe wraps it.")
      .def_property_readonly("num_stages", &Pipe::num_stages)
      .def_property_readonly("table", [](const Pipe& p) { return std::make_shared<PipeTable>(p.table()); })
      .def_property_readonly("notes", &Pipe::notes)
      .def_property_readonly("input_names", &Pipe::input_names)
      .def("stage", &Pipe::stage, py::arg("index"))
      .def("with_stages", &Pipe::with_stages, py::arg("stages"))
      .def("run", &Pipe::run, FreeGil(), py::arg("inputs"))
      .def(
          "run_with_backward",
          [](const Pipe& p, std::vector<c10::IValue> inputs) { return p.run_with_backward(std::move(inputs)).outputs; },
          FreeGil(), py::arg("inputs"))
      .def("merged_state", [](const Pipe& p) { return to_entries(p.merge_state_dict()); })
      .def("merge",
           [](const Pipe& p) {
             auto module = p.merge();
             for (Node* node : module->graph().nodes()) {
               if (is_pipe_split(*node)) module->graph().erase(node);
             }
             return module;
           })
      .def("move_stage", &Pipe::move_stage, py::arg("index"), py::arg("device"))
      .def("print_readable", &Pipe::print_readable)
      .def("cost_report", [](const Pipe& p) { return describe_cut(p).report(); })
      .def(
          "serialize_stage", [](const Pipe& p, int index) { return py::bytes(serialize_stage(p, index)); },
          py::arg("index"));
}

void bind_cuts(py::module_& m) {
  m.def("cut", &cut, py::arg("module"), py::kw_only(), py::arg("before_values") = py::none(),
        py::arg("modules") = std::vector<std::pair<std::string, bool>>{}, py::arg("before_ops") = std::vector<size_t>{},
        py::arg("policy") = py::none(), py::arg("transmit") = false,
        py::arg("transmit_by_name") = std::map<std::string, bool>{}, py::arg("move_cuts") = true,
        py::arg("loss") = py::none(), py::arg("wire") = std::pair<std::string, std::string>{},
        py::arg("wire_exclude") = std::vector<std::string>{});
  m.def("balance", &balance_cuts, py::arg("module"), py::arg("stages"), py::kw_only(), py::arg("inputs") = py::none(),
        py::arg("repeats") = 5, py::arg("seconds_per_message") = 0.0, py::arg("bytes_per_second") = 1e10,
        py::arg("memory_limits") = std::vector<int64_t>{}, py::arg("bytes_per_parameter_byte") = 4.0);
  m.def("cuts_of_equal_size", &cuts_of_equal_size, py::arg("module"), py::arg("stages"));
  m.def("cuts_at_size", &cuts_at_size, py::arg("module"), py::arg("bytes"));
  m.def(
      "rewrite_devices",
      [](GraphModule& module, const at::Device& device) { return rewrite_devices(module.graph(), device); },
      py::arg("module"), py::arg("device"));
  m.def(
      "deserialize_stage",
      [](const std::string& bytes) {
        StagePackage package = deserialize_stage(bytes);
        return py::dict(
            "index"_a = package.index, "engine"_a = package.module, "training"_a = package.module->is_training(),
            "table"_a = std::make_shared<PipeTable>(std::move(package.table)), "input_names"_a = package.input_names);
      },
      py::arg("data"));
}

Register partition_part([](py::module_& m) {
  bind_pipe_table(m);
  bind_pipe(m);
  bind_cuts(m);
  bind_specializer(m);
});

}  // namespace
}  // namespace plumb::python
