// `.pt2` files, there and back.
#include "plumb/exported/exported.h"
#include "module.h"

namespace plumb::python {
namespace {

std::pair<std::shared_ptr<GraphModule>, std::shared_ptr<ExportedProgram>> load(const std::string& path,
                                                                               std::optional<at::Device> device,
                                                                               const std::string& model) {
  auto program = std::make_shared<ExportedProgram>(load_pt2(path, {.model = model, .device = device}));
  auto engine = std::move(program->module);
  return {std::move(engine), std::move(program)};
}

// The engine's graph with what Python keeps beside it: inputs that may have one value only, outputs without tensors.
std::shared_ptr<GraphModule> with_values(const std::shared_ptr<GraphModule>& engine,
                                         const std::vector<c10::IValue>& inputs,
                                         const std::vector<c10::IValue>& outputs) {
  auto none = [](const c10::IValue& v) { return v.isNone(); };
  if (std::all_of(inputs.begin(), inputs.end(), none) && std::all_of(outputs.begin(), outputs.end(), none))
    return engine;
  auto module =
      std::make_shared<GraphModule>(engine->graph().clone(), engine->state(), engine->in_spec(), engine->out_spec());
  module->copy_mode(*engine);
  Graph& graph = module->graph();
  const std::vector<Node*> placeholders = graph.placeholders();
  for (size_t i = 0; i < inputs.size() && i < placeholders.size(); ++i) {
    if (none(inputs[i])) continue;
    Value* value = placeholders[i]->result();
    graph.call(inputs[i].isString() ? "plumb::check_input.str" : "plumb::check_input",
               {value, inputs[i], Arg(value->name())});
  }
  Node* output = graph.output_node();
  for (size_t i = 0; i < outputs.size() && i < output->args().size(); ++i) {
    if (!none(outputs[i])) output->set_arg(i, Arg(outputs[i]));
  }
  return module;
}

void save(const std::shared_ptr<GraphModule>& engine, const ExportedProgram* program,
          const std::vector<c10::IValue>& inputs, const std::vector<c10::IValue>& outputs, bool unit_scaled_layers,
          const std::string& path) {
  ExportedProgram file;
  if (program) file = *program;
  file.unit_scaled_layers = unit_scaled_layers;
  file.module = with_values(engine, inputs, outputs);
  save_pt2(file, path);
}

using Ranges = std::map<std::string, std::pair<std::optional<int64_t>, std::optional<int64_t>>>;

// Fields of a pickle beside `ranges` and `sample_inputs`.
auto fields(ExportedProgram& p) {
  return std::tie(p.guards, p.symbol_spelling, p.value_expressions, p.argument_names, p.submodules, p.namedtuple_fields,
                  p.opset_versions, p.torch_version, p.schema_major, p.schema_minor, p.pretrained,
                  p.unit_scaled_layers);
}

template <class... T>
void take(std::tuple<T&...> to, py::handle from) {
  to = from.cast<std::tuple<T...>>();
}

// Bytes that are no text have to stay bytes in Python.
py::tuple to_tuple(ExportedProgram& p) {
  Ranges ranges;
  for (const auto& [name, range] : p.ranges) ranges[name] = {range.min, range.max};
  return py::make_tuple(ranges, py::bytes(p.sample_inputs), fields(p));
}

ExportedProgram from_tuple(const py::tuple& t) {
  ExportedProgram p;
  for (const auto& [name, range] : t[0].cast<Ranges>()) p.ranges[name] = {range.first, range.second};
  p.sample_inputs = t[1].cast<std::string>();
  take(fields(p), t[2]);
  return p;
}

Register exported_part([](py::module_& m) {
  py::class_<ExportedProgram, std::shared_ptr<ExportedProgram>>(
      m, "ExportedProgram", "Module's record that only a .pt2 file has: arguments, layers, origin.")
      .def(py::init<>())
      .def_readonly("argument_names", &ExportedProgram::argument_names)
      .def_readwrite("pretrained", &ExportedProgram::pretrained)
      .def_readonly("unit_scaled_layers", &ExportedProgram::unit_scaled_layers)
      .def_property_readonly("sample_inputs", [](const ExportedProgram& p) { return py::bytes(p.sample_inputs); })
      .def(py::pickle(&to_tuple, &from_tuple));
  m.def("load_pt2", &load, py::arg("path"), py::arg("device"), py::arg("model"), FreeGil());
  m.def("save_pt2", &save, FreeGil(), py::arg("module"), py::arg("program"), py::arg("inputs"), py::arg("outputs"),
        py::arg("unit_scaled_layers"), py::arg("path"));
});

}  // namespace
}  // namespace plumb::python
