// Graph, Node, GraphModule.
#include "module.h"
#include "plumb/graph/aliases.h"
#include "plumb/graph/graph_module.h"
#include "plumb/graph/names.h"
#include "plumb/graph/node_kind.h"
#include "plumb/graph/pass.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/graph/summary.h"
#include "plumb/operators/operator_facts.h"

namespace plumb::python {
namespace {

// Values become ("value", name): Python code that rebuilds the graph (as torch.fx) resolves them.
py::object arg_to_python(const Arg& arg, IntMeaning meaning) {
  if (arg.is_value()) return py::make_tuple("value", arg.value()->name());
  if (arg.is_list()) {
    py::list list;
    for (const Arg& e : arg.list()) list.append(arg_to_python(e, meaning));
    return list;
  }
  const c10::IValue& v = arg.constant();
  if (v.isInt()) {
    if (meaning == IntMeaning::ScalarType) return py::cast(static_cast<at::ScalarType>(v.toInt()));
    if (meaning == IntMeaning::Layout) {
      PyObject* layout = reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(v.toInt())));
      return py::reinterpret_borrow<py::object>(layout);
    }
    if (meaning == IntMeaning::MemoryFormat) return py::cast(static_cast<at::MemoryFormat>(v.toInt() & 3));
  }
  return to_python(v);
}

void bind_value(py::module_& m) {
  py::class_<Value, std::unique_ptr<Value, py::nodelete>>(m, "Value", "A result of a node.")
      .def_property_readonly("name", &Value::name)
      .def_property_readonly("producer", &Value::producer, py::return_value_policy::reference_internal)
      .def_property_readonly("users", &Value::users, py::return_value_policy::reference_internal)
      .def_property_readonly("is_tensor", &Value::is_tensor)
      .def_property_readonly(
          "meta", [](const Value& v) { return to_python(v.meta()); },
          "dtype, shape, stride, device, requires_grad, symbols; None when unknown")
      .def("__repr__", [](const Value& v) { return "%" + v.name(); });
}

py::list args_of(const Node& n) {
  py::list args;
  for (size_t i = 0; i < n.args().size(); ++i) {
    args.append(arg_to_python(n.arg(i), n.is_call() ? int_meaning(n.schema().arguments()[i]) : IntMeaning::Plain));
  }
  return args;
}

// (name, keyword only) of every argument of a call.
std::vector<std::pair<std::string, bool>> arg_names_of(const Node& n) {
  std::vector<std::pair<std::string, bool>> names;
  if (!n.is_call()) return names;
  for (const auto& a : n.schema().arguments()) names.emplace_back(a.name(), a.kwarg_only());
  return names;
}

// (path, type) of every module around a node, outermost first.
std::vector<std::pair<std::string, std::string>> module_stack_of(const Node& n) {
  std::vector<std::pair<std::string, std::string>> stack;
  if (!n.meta().modules) return stack;
  for (const auto& f : *n.meta().modules) stack.emplace_back(f.path, f.type);
  return stack;
}

py::object source_of(const Node& n) {
  if (!n.meta().source) return py::none();
  return py::make_tuple(n.meta().source->file, n.meta().source->line, n.meta().source->function);
}

void bind_node(py::module_& m) {
  py::class_<Node, std::unique_ptr<Node, py::nodelete>>(m, "Node", "One operation of a graph.")
      .def_property_readonly("op", [](const Node& n) { return to_string(n.kind()); })
      .def_property_readonly("target", &Node::target)
      .def_property_readonly("name",
                             [](const Node& n) { return n.num_results() ? n.result()->name() : std::string("output"); })
      .def_property_readonly("results", &Node::results, py::return_value_policy::reference_internal)
      .def_property_readonly("result_layout", &Node::result_layout)
      .def_property_readonly("inputs", &Node::inputs, py::return_value_policy::reference_internal)
      .def_property_readonly("args", &args_of)
      .def_property_readonly("arg_names", &arg_names_of)
      .def_property_readonly("grad_enabled", [](const Node& n) { return n.meta().grad_enabled; })
      .def_property_readonly("module_path", [](const Node& n) { return n.meta().module_path(); })
      .def_property_readonly("module_stack", &module_stack_of)
      .def_property_readonly("source", &source_of)
      .def("__repr__", &Node::describe);
}

void bind_graph(py::module_& m) {
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph", "SSA graph of ATen calls; print() shows its text form.")
      .def_property_readonly(
          "nodes",
          [](const Graph& g) {
            std::vector<Node*> nodes;
            for (Node* n : g.nodes()) nodes.push_back(n);
            return nodes;
          },
          py::return_value_policy::reference_internal)
      .def("__len__", &Graph::size)
      .def("lint", [](const Graph& g) { lint(g); })
      .def(
          "to_string", [](const Graph& g, bool types, bool locations) { return to_string(g, {types, locations}); },
          py::arg("types") = true, py::arg("locations") = true)
      .def("__str__", [](const Graph& g) { return to_string(g, {true, false}); })
      .def("__repr__", [](const Graph& g) { return "<Graph: " + summary(g) + "; print() shows it>"; })
      .def("clone", [](const Graph& g) { return std::make_shared<Graph>(g.clone()); });
  m.def(
      "parse_graph", [](const std::string& text) { return std::make_shared<Graph>(parse_graph(text)); },
      py::arg("text"));
  m.def(
      "allow_operators",
      [](const py::args& names) {
        for (const py::handle& name : names) allow_operators(py::cast<std::string>(name));
      },
      "Let files that this process reads from now on name these operators: `\"mylib::op\"`, or `\"mylib\"` for all\n"
      "of a namespace. Files may come from anywhere, so `load_pt2`, `parse_graph` and `deserialize_stage` refuse\n"
      "operators that plumb does not know as tensor arithmetic. Allow what is safe with arguments that a file's "
      "author\n"
      "chose.");
  m.def("depends_on_mode", &depends_on_mode, py::arg("graph"), py::arg("training"));
  m.def("summary", [](const Graph& g) { return summary(g); }, py::arg("graph"));
  // The row of an operator, as far as Python asks; None without one.
  m.def(
      "operator_facts",
      [](const std::string& name) -> py::object {
        const OperatorFacts* facts = find_operator_facts(name);
        if (!facts) return py::none();
        return py::dict("refused"_a = facts->refused, "sizes_from_values"_a = facts->data_sizes == DataSizes::Always);
      },
      py::arg("name"));
  m.def("operator_table", [] {
    std::vector<std::string> names;
    for (const OperatorFacts* facts : operator_table()) names.emplace_back(facts->name);
    return names;
  });
  m.def(
      "refused_in_files",
      [](const std::string& name) -> std::optional<std::string> {
        auto refusal = refused_in_files(name);
        return refusal ? std::optional(refusal->message) : std::nullopt;
      },
      py::arg("name"));
}

std::shared_ptr<GraphModule> make_module(const std::string& text, const std::vector<StateEntry>& state,
                                         const std::string& in_spec, const std::string& out_spec) {
  // Pickles and copies of a graph of this process. Loading a pickle trusts it with more than operators.
  return std::make_shared<GraphModule>(parse_trusted_graph(text), to_state(state), TreeSpec::from_json(in_spec),
                                       TreeSpec::from_json(out_spec));
}

// [(pass, changed, seconds, notes), ...]
std::vector<std::tuple<std::string, bool, double, std::vector<std::string>>> run_steps(
    GraphModule& g, const std::vector<std::string>& steps, const std::string& dump) {
  std::vector<PassStep> sequence;
  for (const std::string& step : steps) sequence.push_back(parse_pass_step(step));
  std::vector<std::tuple<std::string, bool, double, std::vector<std::string>>> done;
  for (const PassResult& r : run_passes(sequence, g, {.dump = dump}))
    done.emplace_back(r.pass, r.changed, r.seconds, r.notes);
  g.sync_module();
  return done;
}

void bind_graph_module(py::module_& m) {
  // Not a torch.nn.Module in Python: plumb.GraphModule wraps it.
  py::class_<GraphModule, std::shared_ptr<GraphModule>>(m, "GraphModule")
      .def(py::init(&make_module), py::arg("text"), py::arg("state"), py::arg("in_spec"), py::arg("out_spec"))
      .def("run", &GraphModule::run, FreeGil(), py::arg("inputs"))
      .def("run1",
           [](GraphModule& g, const py::args& inputs) {  // tensors in, one tensor out
             auto values = inputs.cast<std::vector<c10::IValue>>();
             py::gil_scoped_release release;
             return g.run(std::move(values))[0].toTensor();
           })
      .def_property_readonly(
          "graph", [](GraphModule& g) { return &g.graph(); }, py::return_value_policy::reference_internal)
      .def_property(
          "training", [](const GraphModule& g) { return g.is_training(); }, &GraphModule::set_made_in_training)
      .def_property("mode_read_at", &GraphModule::mode_read_at, &GraphModule::set_mode_read_at,
                    "the line where the captured forward reads its training mode; empty if it does not")
      .def("state", [](const GraphModule& g) { return to_entries(g.state()); })
      .def(
          "written",
          [](GraphModule& g) {
            std::vector<std::string> names;
            for (const Attr* attr : written_state(g.graph(), g.state())) names.push_back(attr->name);
            return std::make_pair(names, written_inputs(g.graph()));
          },
          "the names of the state, and the numbers of the inputs, that a run writes")
      // Many at once: the module's own tables are made again for every change. Its lock's holder may wait for Python.
      .def("set_state", &GraphModule::set_state, FreeGil(), py::arg("tensors"))
      .def("specs", [](const GraphModule& g) { return py::make_tuple(g.in_spec().to_json(), g.out_spec().to_json()); })
      .def("run_passes", &run_steps, py::arg("steps"), py::arg("dump") = "");
}

Register graph_part([](py::module_& m) {
  bind_value(m);
  bind_node(m);
  bind_graph(m);
  bind_graph_module(m);
});

}  // namespace
}  // namespace plumb::python
