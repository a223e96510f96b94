// `.pt2` files, there and back.
#include "plumb/exported/exported.h"
#include "convert.h"
#include "module.h"

namespace plumb::python {
namespace {

py::tuple load(const std::string& path, std::optional<at::Device> device) {
  ExportedProgram program;
  {
    py::gil_scoped_release release;
    LoadOptions options;
    options.device = device;
    program = load_pt2(path, options);
  }
  std::shared_ptr<GraphModule> engine = std::move(program.module);
  return py::make_tuple(engine, std::make_shared<ExportedProgram>(std::move(program)));
}

// The engine's graph with what Python keeps beside it: inputs that may have one value only, outputs that are no
// tensors.
std::shared_ptr<GraphModule> with_values(const std::shared_ptr<GraphModule>& engine,
                                         const std::vector<c10::IValue>& inputs,
                                         const std::vector<c10::IValue>& outputs) {
  auto none = [](const c10::IValue& v) { return v.isNone(); };
  if (std::all_of(inputs.begin(), inputs.end(), none) && std::all_of(outputs.begin(), outputs.end(), none))
    return engine;
  auto module =
      std::make_shared<GraphModule>(engine->graph().clone(), engine->state(), engine->in_spec(), engine->out_spec());
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

void save(const std::shared_ptr<GraphModule>& engine, const ExportedProgram* program, const py::list& inputs,
          const py::list& outputs, bool unit_scaled_layers, const std::string& path) {
  ExportedProgram file;
  if (program) file = *program;
  file.unit_scaled_layers = unit_scaled_layers;
  file.module = with_values(engine, to_ivalues(inputs), to_ivalues(outputs));
  py::gil_scoped_release release;
  save_pt2(file, path);
}

// Bytes that are no text have to stay bytes in Python.
py::tuple to_tuple(const ExportedProgram& p) {
  std::map<std::string, std::pair<std::optional<int64_t>, std::optional<int64_t>>> ranges;
  for (const auto& [name, range] : p.ranges) ranges[name] = {range.min, range.max};
  return py::make_tuple(ranges, p.guards, p.symbol_spelling, p.value_expressions, p.argument_names, p.submodules,
                        p.namedtuple_fields, p.opset_versions, py::bytes(p.sample_inputs), p.torch_version,
                        p.schema_major, p.schema_minor, p.pretrained, p.unit_scaled_layers);
}

template <typename T>
void take(const py::tuple& from, size_t i, T& to) {
  to = from[i].cast<T>();
}

ExportedProgram from_tuple(const py::tuple& t) {
  ExportedProgram p;
  std::map<std::string, std::pair<std::optional<int64_t>, std::optional<int64_t>>> ranges;
  take(t, 0, ranges);
  for (const auto& [name, range] : ranges) p.ranges[name] = {range.first, range.second};
  take(t, 1, p.guards);
  take(t, 2, p.symbol_spelling);
  take(t, 3, p.value_expressions);
  take(t, 4, p.argument_names);
  take(t, 5, p.submodules);
  take(t, 6, p.namedtuple_fields);
  take(t, 7, p.opset_versions);
  p.sample_inputs = t[8].cast<std::string>();
  take(t, 9, p.torch_version);
  take(t, 10, p.schema_major);
  take(t, 11, p.schema_minor);
  take(t, 12, p.pretrained);
  take(t, 13, p.unit_scaled_layers);
  return p;
}

Register exported_part([](py::module_& m) {
  py::class_<ExportedProgram, std::shared_ptr<ExportedProgram>>(m, "ExportedProgram",
                                                                "What only a .pt2 file knows of a module.")
      .def(py::init<>())
      .def_readonly("argument_names", &ExportedProgram::argument_names)
      .def_readwrite("pretrained", &ExportedProgram::pretrained)
      .def_readonly("unit_scaled_layers", &ExportedProgram::unit_scaled_layers)
      .def_property_readonly("sample_inputs", [](const ExportedProgram& p) { return py::bytes(p.sample_inputs); })
      .def(py::pickle(&to_tuple, &from_tuple));
  m.def("load_pt2", &load, py::arg("path"), py::arg("device"));
  m.def("save_pt2", &save);
});

}  // namespace
}  // namespace plumb::python
