// Capture of Python modules: the callbacks that the engine needs from Python.
#include "plumb/capture/capture.h"
#include "convert.h"
#include "module.h"
#include "plumb/capture/nested.h"

#include <frameobject.h>

#include <unordered_map>

namespace plumb::python {
namespace {

// The first frame, from the innermost out, that is neither torch's nor plumb's own.
class Locator {
 public:
  // describe, if not None, answers what in Python calls the operator, or None; asked for every operator.
  Locator(std::vector<std::string> inside, py::object describe)
      : inside_(std::move(inside)), describe_(std::move(describe)) {}
  ~Locator() {
    py::gil_scoped_acquire gil;
    known_.clear(), kept_.clear(), calls_.clear();
    describe_ = py::object();
  }

  std::shared_ptr<const SourceLocation> operator()() {
    py::gil_scoped_acquire gil;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    std::shared_ptr<const SourceLocation> found;
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      if (!is_inside(code)) found = location(code, PyFrame_GetLineNumber(frame));
      Py_DECREF(code);
      PyFrameObject* back = found ? nullptr : PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    if (describe_.is_none()) return found;
    py::object call = describe_();
    if (call.is_none()) return found;
    // One location for each call: nodes know theirs by its address.
    found = std::make_shared<const SourceLocation>(found ? *found : SourceLocation{});
    calls_.emplace_back(found, std::move(call));
    return found;
  }

  // [(names of the results, operator, what describe() answered)] for the nodes of the graph.
  py::list calls(const Graph& graph) const {
    std::unordered_map<const SourceLocation*, const py::object*> known;
    for (const auto& [location, call] : calls_) known.emplace(location.get(), &call);
    py::list all;
    for (const Node* node : graph.nodes()) {
      auto it = known.find(node->meta().source.get());
      if (!node->meta().source || it == known.end()) continue;
      py::list names;
      for (const Value* value : node->results()) names.append(value->name());
      all.append(py::make_tuple(std::move(names), node->target(), *it->second));
    }
    return all;
  }

 private:
  bool is_inside(PyCodeObject* code) {
    auto [it, fresh] = known_.emplace(code, false);
    if (fresh) {
      Py_INCREF(code);  // its address must not be used again while it is a key
      kept_.push_back(py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(code)));
      const std::string file = py::str(code->co_filename);
      for (const std::string& folder : inside_) it->second = it->second || file.starts_with(folder);
      it->second = it->second || file.starts_with("<");
    }
    return it->second;
  }
  std::shared_ptr<const SourceLocation> location(PyCodeObject* code, int line) {
    auto& slot = locations_[{code, line}];
    if (!slot) {
      slot = std::make_shared<const SourceLocation>(
          SourceLocation{py::str(code->co_filename), line, py::str(code->co_name)});
    }
    return slot;
  }

  std::vector<std::string> inside_;
  py::object describe_;
  std::vector<std::pair<std::shared_ptr<const SourceLocation>, py::object>> calls_;
  std::unordered_map<PyCodeObject*, bool> known_;
  std::vector<py::object> kept_;
  std::map<std::pair<PyCodeObject*, int>, std::shared_ptr<const SourceLocation>> locations_;
};

py::tuple capture_python(const std::vector<std::tuple<std::string, int, at::Tensor, bool>>& state,
                         const py::list& inputs, const std::vector<std::string>& names, const std::string& in_spec,
                         const py::function& call, const py::function& buffers_after,
                         const py::function& attributes_after, const py::function& is_check,
                         const std::vector<std::string>& inside, bool training, bool verify, const py::object& describe,
                         bool guard_values, const std::vector<at::Tensor>& decisions) {
  CaptureRequest request;
  for (const auto& [name, kind, tensor, persistent] : state)
    request.state.add({name, static_cast<AttrKind>(kind), tensor, persistent});
  request.inputs = to_ivalues(inputs);
  request.in_spec = TreeSpec::from_json(in_spec);
  request.training = training;
  request.guard_values = guard_values;
  request.decisions = decisions;
  request.call = [&](const std::vector<c10::IValue>& flat, TreeSpec& out_spec) {
    py::gil_scoped_acquire gil;
    auto answer = call(to_list(flat)).cast<std::pair<py::list, std::string>>();
    out_spec = TreeSpec::from_json(answer.second);
    return to_ivalues(answer.first);
  };
  request.buffers_after = [&] {
    py::gil_scoped_acquire gil;
    return buffers_after().cast<std::vector<std::pair<std::string, at::Tensor>>>();
  };
  request.attributes_after = [&] {
    py::gil_scoped_acquire gil;
    return attributes_after().cast<std::vector<std::tuple<std::string, at::Tensor, at::Tensor>>>();
  };
  request.is_check = [&] {
    py::gil_scoped_acquire gil;
    return is_check().cast<bool>();
  };
  auto locator = std::make_shared<Locator>(inside, describe);
  request.locate = [locator] { return (*locator)(); };
  std::vector<std::string> notes;
  CaptureOptions options;
  options.verify = verify;
  options.input_names = names;
  options.notes = &notes;
  std::shared_ptr<GraphModule> engine;
  {
    py::gil_scoped_release release;  // autograd refuses to run under the lock; the callbacks take it
    engine = capture(request, options);
  }
  return py::make_tuple(engine, notes, locator->calls(engine->graph()));
}

// Gives values new names; one that is taken gets a number. Answers what they got.
std::vector<std::string> rename_values(GraphModule& engine,
                                       const std::vector<std::pair<std::string, std::string>>& names) {
  Graph& graph = engine.graph();
  std::vector<Value*> values;
  for (const auto& [from, to] : names) {
    Value* value = graph.find_value(from);
    if (!value) throw Error(ErrorKind::UnknownName, "the graph has no value %" + from);
    values.push_back(value);
  }
  // All old names go first: a new one may be another's old one.
  for (Value* value : values) value->rename(graph.unique_name("renamed"));
  std::vector<std::string> given;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i]->rename(graph.unique_name(names[i].second));
    given.push_back(values[i]->name());
  }
  return given;
}

// A Python callable on a list of tensors, kept by the engine for the life of the process.
int64_t register_python(py::function function, std::string name) {
  auto* held = new py::function(std::move(function));  // never freed: replay may outlive the interpreter's teardown
  return register_opaque(
      [held](const std::vector<at::Tensor>& inputs) {
        py::gil_scoped_acquire gil;
        return (*held)(inputs).cast<std::vector<at::Tensor>>();
      },
      std::move(name));
}

struct Pause {
  std::unique_ptr<PausedCapture> held;
};

// What plumb::decision nodes see while it is entered.
struct Decisions {
  std::unique_ptr<DecisionLog> log;
  std::vector<at::Tensor> tensors;
};

Register capture_part([](py::module_& m) {
  m.def("capture", &capture_python);
  m.def("run_recorded", [](GraphModule& g, const py::list& inputs) {
    auto values = to_ivalues(inputs);
    {
      py::gil_scoped_release release;
      values = run_recorded(g, std::move(values));
    }
    return to_list(values);
  });
  py::class_<Pause>(m, "PausedCapture")
      .def(py::init<>())
      .def("__enter__", [](Pause& pause) { pause.held = std::make_unique<PausedCapture>(); })
      .def("__exit__", [](Pause& pause, const py::args&) { pause.held.reset(); });
  m.def("rename_values", &rename_values);
  m.def("push_module", &push_module);
  m.def("pop_module", &pop_module);
  m.def("is_capturing", &is_capturing);
  m.def("refuse", &refuse_capture);
  m.def("size_depends_on_values", &size_depends_on_values);
  m.def("guard_size", &guard_size_read);
  m.def("guard_values", [](const at::Tensor& tensor) -> std::optional<at::Tensor> {
    at::Tensor copy = guard_values_read(tensor);
    return copy.defined() ? std::optional(copy) : std::nullopt;
  });
  py::class_<Decisions>(m, "Decisions")
      .def(py::init<>())
      .def("__enter__", [](Decisions& d) { d.log = std::make_unique<DecisionLog>(); })
      .def("__exit__",
           [](Decisions& d, const py::args&) {
             d.tensors = std::move(d.log->tensors);
             d.log.reset();
           })
      .def_readonly("tensors", &Decisions::tensors);
  m.def("register_opaque", &register_python);
});

}  // namespace
}  // namespace plumb::python
