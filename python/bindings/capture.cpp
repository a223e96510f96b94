// Capture of Python modules: the callbacks that the engine needs from Python.
#include "plumb/capture/capture.h"
#include "module.h"
#include "plumb/capture/guards.h"
#include "plumb/capture/nested.h"
#include "plumb/tensors/deferred_checks.h"

#include <frameobject.h>
#include <pybind11/functional.h>

#include <algorithm>
#include <unordered_map>

namespace plumb::python {
namespace {

// The first frame, from the innermost out, that is neither torch's nor plumb's own.
class Locator {
 public:
  // describe: None, or a function that returns the Python caller of the operator, or None. Called for every operator.
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

  // Returns [(names of the results, operator, result of describe())] for the nodes of the graph.
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
      const std::string file = utf8_of(code->co_filename);
      for (const std::string& folder : inside_) it->second = it->second || file.starts_with(folder);
      it->second = it->second || file.starts_with("<");
    }
    return it->second;
  }
  std::shared_ptr<const SourceLocation> location(PyCodeObject* code, int line) {
    auto& slot = locations_[{code, line}];
    if (!slot) {
      slot = std::make_shared<const SourceLocation>(
          SourceLocation{utf8_of(code->co_filename), line, utf8_of(code->co_name)});
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

// A method of `forward` as C++ calls it: under the GIL, from any thread.
template <typename Call>
void take_method(std::function<Call>& to, const py::object& forward, const char* name) {
  to = forward.attr(name).cast<std::function<Call>>();
}

// forward: plumb._capture.forward._Forward.
CaptureRequest request_of(const py::object& forward) {
  CaptureRequest request;
  request.state = to_state(forward.attr("state").cast<std::vector<StateEntry>>());
  request.inputs = forward.attr("inputs").cast<std::vector<c10::IValue>>();
  request.in_spec = TreeSpec::from_json(forward.attr("in_spec").cast<std::string>());
  request.training = forward.attr("training").cast<bool>();
  std::function<std::pair<std::vector<c10::IValue>, std::string>(const std::vector<c10::IValue>&)> call;
  take_method(call, forward, "call");
  request.call = [call](const std::vector<c10::IValue>& flat, TreeSpec& out_spec) {
    auto [outputs, spec] = call(flat);
    out_spec = TreeSpec::from_json(spec);
    return outputs;
  };
  take_method(request.buffers_after, forward, "buffers_after");
  take_method(request.attributes_after, forward, "attributes_after");
  take_method(request.is_check, forward, "is_check");
  take_method(request.begin_attempt, forward, "begin_attempt");
  request.has_libraries = forward.attr("has_libraries").cast<bool>();
  if (auto folders = forward.attr("library_folders").cast<std::vector<std::string>>(); !folders.empty()) {
    request.in_library = [folders = std::move(folders)](const SourceLocation& at) {
      return std::any_of(folders.begin(), folders.end(),
                         [&](const std::string& folder) { return at.file.starts_with(folder); });
    };
  }
  return request;
}

// describe: as for Locator.
py::tuple capture_python(const py::object& forward, bool verify, const py::object& describe, bool guard_values,
                         std::optional<std::vector<at::Tensor>> control_values) {
  CaptureRequest request = request_of(forward);
  request.guard_values = guard_values;
  request.unit_weights = forward.attr("unit_weights").cast<bool>();
  request.control_values = std::move(control_values);
  auto locator = std::make_shared<Locator>(forward.attr("inside").cast<std::vector<std::string>>(), describe);
  request.locate = [locator] { return (*locator)(); };
  std::vector<std::string> notes;
  CaptureOptions options;
  options.verify = verify;
  options.input_names = forward.attr("input_names").cast<std::vector<std::string>>();
  options.notes = &notes;
  std::shared_ptr<GraphModule> module;
  {
    py::gil_scoped_release release;  // autograd refuses to run under the lock; the callbacks take it
    module = capture(request, options);
  }
  return py::make_tuple(module, notes, locator->calls(module->graph()));
}

// Gives values new names; one that is taken gets a number. Returns the names they got.
std::vector<std::string> rename_values(GraphModule& module,
                                       const std::vector<std::pair<std::string, std::string>>& names) {
  Graph& graph = module.graph();
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
int64_t register_python(std::function<Tensors(const Tensors&)> function, std::string name) {
  // Never freed: replay may outlive the interpreter's teardown.
  auto* kept = new std::function<Tensors(const Tensors&)>(std::move(function));
  return register_opaque([kept](const Tensors& inputs) { return (*kept)(inputs); }, std::move(name));
}

// A C++ object that lives while Python is in a `with` block.
template <typename Scope>
struct Entered {
  std::unique_ptr<Scope> scope;
  void enter() { scope = std::make_unique<Scope>(); }
};

// The tensors that plumb::control_value nodes see while it is entered.
struct PythonControlValueLog : Entered<ControlValueLog> {
  std::vector<at::Tensor> tensors;
};

Register capture_part([](py::module_& m) {
  m.def("capture", &capture_python, py::arg("forward"), py::arg("verify"), py::arg("describe"), py::arg("guard_values"),
        py::arg("control_values"));
  m.def("run_recorded", &run_recorded, FreeGil(), py::arg("module"), py::arg("inputs"));
  using Pause = Entered<PausedCapture>;
  py::class_<Pause>(m, "PausedCapture")
      .def(py::init<>())
      .def("__enter__", &Pause::enter)
      .def("__exit__", [](Pause& pause, const py::args&) { pause.scope.reset(); });
  m.def("rename_values", &rename_values, py::arg("module"), py::arg("names"));
  m.def("push_module", &push_module, py::arg("path"), py::arg("type"));
  m.def("pop_module", &pop_module);
  m.def("is_capturing", &is_capturing);
  m.def("refuse", &refuse_capture, py::arg("what"), py::arg("remedy"));
  m.def("assign_data", &assign_data, py::arg("tensor"), py::arg("value"), FreeGil());
  m.def("is_computed", &is_computed, py::arg("tensor"));
  m.def("is_result", &is_result, py::arg("tensor"));
  m.def("size_depends_on_values", &size_depends_on_values, py::arg("tensor"));
  m.def("guard_size", &guard_size_read, py::arg("tensor"), py::arg("exact"));
  m.def("requires_grad_as_given", &requires_grad_as_given, py::arg("tensor"), py::arg("guarded"));
  m.def(
      "guard_values",
      [](const at::Tensor& tensor) -> std::optional<at::Tensor> {
        at::Tensor copy = guard_values_read(tensor);
        return copy.defined() ? std::optional(copy) : std::nullopt;
      },
      py::arg("tensor"));
  py::class_<PythonControlValueLog>(m, "ControlValueLog")
      .def(py::init<>())
      .def("__enter__", &PythonControlValueLog::enter)
      .def("__exit__",
           [](PythonControlValueLog& log, const py::args&) {
             log.tensors = std::move(log.scope->tensors);
             log.scope.reset();
           })
      .def_readonly("tensors", &PythonControlValueLog::tensors);
  using Checks = Entered<DeferredChecks>;
  py::class_<Checks>(
      m, "DeferredChecks",
      "``with plumb.DeferredChecks():`` around a training step: checks that captured models make of values on a "
      "device\n"
      "(guard nodes) are read once, at its end, and the first that failed raises its :class:`plumb.Error` there. "
      "Without\n"
      "it the host waits once for every run of such a graph. The steps of a pipeline have it already. On the CPU it\n"
      "changes nothing. Of the thread that enters it.")
      .def(py::init<>())
      .def("__enter__", &Checks::enter)
      .def(
          "__exit__",
          [](Checks& checks, const py::object& type, const py::object&, const py::object&) {
            const auto scope = std::move(checks.scope);
            if (!scope || !type.is_none()) return;
            py::gil_scoped_release release;
            scope->raise();
          },
          py::arg("type"), py::arg("error"), py::arg("traceback"));
  m.def("register_opaque", &register_python, py::arg("function"), py::arg("name"));
});

}  // namespace
}  // namespace plumb::python
