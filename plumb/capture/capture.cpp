#include "plumb/capture/capture.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <deque>
#include <mutex>
#include <sstream>

#include "plumb/capture/session.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

struct OpaqueTable {
  std::mutex mutex;
  std::deque<std::pair<OpaqueFunction, std::string>> functions;  // addresses stay
};
OpaqueTable& opaque_table() {
  static OpaqueTable* table = new OpaqueTable;  // outlives Python objects that functions may hold at exit
  return *table;
}

const std::pair<OpaqueFunction, std::string>& opaque(int64_t id) {
  auto& table = opaque_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  if (id < 0 || id >= static_cast<int64_t>(table.functions.size())) {
    throw Error(ErrorKind::UnknownName,
                "plumb::python_function " + std::to_string(id) + " does not exist in this process", "",
                "graphs that call Python functions cannot leave the process that captured them");
  }
  return table.functions[static_cast<size_t>(id)];
}

// A replay ignores its caller's autocast; the function has the region that it was captured in.
class AutocastAllowed {
 public:
  AutocastAllowed() {
    for (c10::DispatchKey key : c10::autocast_dispatch_keyset) {
      if (!c10::impl::tls_is_dispatch_key_excluded(key)) continue;
      excluded_.push_back(key);
      c10::impl::tls_set_dispatch_key_excluded(key, false);
    }
  }
  ~AutocastAllowed() {
    for (c10::DispatchKey key : excluded_) c10::impl::tls_set_dispatch_key_excluded(key, true);
  }
  AutocastAllowed(const AutocastAllowed&) = delete;

 private:
  std::vector<c10::DispatchKey> excluded_;
};

std::vector<at::Tensor> python_function(int64_t id, at::TensorList inputs) {
  AutocastAllowed allowed;
  return opaque(id).first(inputs.vec());
}

struct OneCapture {
  std::shared_ptr<GraphModule> module;
  std::vector<std::string> notes;
};

struct Attempt {
  bool may_stand_in = false;
  bool open_composites = false;
  bool stood_in = false, needs_open = false;  // afterwards
};

// What the model has put in the places of buffers and attributes; the old ones are there again afterwards.
void write_back(Session& session) {
  const CaptureRequest& request = session.request;
  if (request.buffers_after) {
    for (const auto& [name, tensor] : request.buffers_after()) {
      for (size_t i = 0; i < session.num_state && tensor.defined(); ++i) {
        const Attr& attr = session.attributes[i];
        if (attr.kind == AttrKind::Buffer && attr.name == name && !tensor.is_same(attr.tensor))
          session.write_back(static_cast<int>(i), tensor, "buffer '" + name + "'");
      }
    }
  }
  if (request.attributes_after) {
    for (const auto& [name, old, now] : request.attributes_after()) session.write_back_attribute(name, old, now);
  }
}

OneCapture capture_once(const CaptureRequest& request, const CaptureOptions& options, Attempt& attempt) {
  c10::InferenceMode normal(false);
  Session session(request);
  session.may_stand_in = attempt.may_stand_in;
  session.open_composites = attempt.open_composites;
  // With grad on, so that torch's fused inference paths do not hide the operators.
  at::AutoGradMode grad(true);
  auto inputs = session.feed();
  TreeSpec out_spec;
  std::vector<c10::IValue> outputs;
  session.start();
  try {
    outputs = request.call(inputs, out_spec);
    // The program may have caught it.
    if (session.needs_values) throw NeedsValues();
    if (session.needs_open) throw NeedsOpenComposites();
    if (session.refusal) throw *session.refusal;
  } catch (...) {
    session.stop();
    attempt.stood_in = session.stood_in;
    attempt.needs_open = session.needs_open;
    if (request.buffers_after) request.buffers_after();
    if (request.attributes_after) request.attributes_after();
    if (session.refusal) throw *session.refusal;
    throw;
  }
  session.stop();
  write_back(session);
  session.check_buffer_reads();
  OneCapture result;
  result.module = build_graph(session, outputs, std::move(out_spec), options);
  result.notes = std::move(session.notes);
  return result;
}

// Without computing large products, whose values no graph needs, and at the level the calls are written, if that can
// be.
OneCapture capture_once(const CaptureRequest& request, const CaptureOptions& options) {
  Attempt attempt{!options.verify};
  while (true) {
    try {
      return capture_once(request, options, attempt);
    } catch (...) {
      if (attempt.needs_open) {
        attempt = {attempt.may_stand_in, true};
      } else if (attempt.stood_in) {  // a question about values, or a function that does not take zeros
        attempt = {false, attempt.open_composites};
      } else {
        throw;
      }
    }
  }
}

// Other values of the same dtype and shape. Integers are permuted: they stay valid indices.
at::Tensor other_values(const at::Tensor& t) {
  at::NoGradGuard no_grad;
  if (t.device().is_meta()) return t.detach().clone();
  if (t.is_floating_point()) return (at::randn_like(t, at::MemoryFormat::Preserve) * 3 - 1).to(t.scalar_type());
  if (t.numel() < 2 || t.scalar_type() == at::kBool) return t.detach().clone();
  return t.flatten().flip(0).view(t.sizes()).clone();
}

bool equal_or_both_nan(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.device().is_meta()) return true;
  if (a.is_sparse() && b.is_sparse()) return equal_or_both_nan(a.to_dense(), b.to_dense());
  if (at::equal(a, b)) return true;
  if (!a.is_floating_point()) return false;
  return at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(), b.nan_to_num());
}

using Buffers = std::vector<std::pair<std::string, at::Tensor>>;

// Runs with these inputs and answers outputs, gradients of inputs and parameters, and the buffers afterwards. `call`
// may name buffers that it holds in other tensors than the state's.
std::vector<at::Tensor> run_with_gradients(
    const CaptureRequest& request, const std::vector<at::Tensor>& inputs,
    const std::function<std::vector<c10::IValue>(const std::vector<c10::IValue>&, Buffers&)>& call) {
  Session restore(request);  // never started: it only puts everything back
  at::AutoGradMode grad(true);
  at::manual_seed(1234);
  std::vector<at::Tensor> leaves;
  std::vector<c10::IValue> fed;
  size_t next = 0;
  for (const auto& v : request.inputs) {
    if (!v.isTensor() || !v.toTensor().defined()) {
      fed.push_back(v);
      continue;
    }
    at::Tensor leaf = inputs[next++].detach();
    if (leaf.is_floating_point()) leaf.requires_grad_(true);
    leaves.push_back(leaf);
    fed.emplace_back(leaf.clone());
  }
  std::map<std::string, at::Tensor> saved;
  for (const Attr& attr : request.state) {
    if (attr.tensor.defined()) saved[attr.name] = attr.tensor.detach().clone();
    if (attr.kind == AttrKind::Parameter && attr.tensor.defined()) leaves.push_back(attr.tensor);
  }
  Buffers elsewhere;
  auto outputs = call(fed, elsewhere);
  std::vector<at::Tensor> answer, roots, seeds, sources;
  for (const auto& v : outputs) {
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    answer.push_back(v.toTensor().detach().clone());
    if (v.toTensor().requires_grad()) {
      roots.push_back(v.toTensor());
      seeds.push_back(at::ones_like(v.toTensor()));
    }
  }
  for (const at::Tensor& leaf : leaves) {
    if (leaf.requires_grad()) sources.push_back(leaf);
  }
  if (!roots.empty() && !sources.empty()) {
    for (auto& g : torch::autograd::grad(roots, sources, seeds, std::nullopt, false, /*allow_unused=*/true))
      answer.push_back(g);
  }
  at::NoGradGuard no_grad;
  for (const Attr& attr : request.state) {
    auto it = saved.find(attr.name);
    if (it == saved.end()) continue;
    at::Tensor now = attr.tensor;
    for (const auto& [name, tensor] : elsewhere) {
      if (name == attr.name) now = tensor;
    }
    answer.push_back(now.detach().clone());
    attr.tensor.detach().copy_(it->second);
  }
  return answer;
}

// The graph's text without what may differ although the program is the same: numbers of Python functions, and sizes
// that depend on the data.
std::string comparable(const Graph& graph) {
  std::istringstream lines(to_string(graph));
  std::string all;
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find(" = ");
    if (equals != std::string::npos) line = line.substr(equals + 3);
    constexpr std::string_view kCall = "plumb::python_function(";
    if (const size_t at = line.find(kCall); at != std::string::npos) {
      const size_t from = at + kCall.size(), to = line.find(',', from);
      line.replace(from, to - from, opaque_name(std::stoll(line.substr(from, to - from))));
    }
    all += line + "\n";
  }
  return all;
}

void verify(const CaptureRequest& request, const CaptureOptions& options, const OneCapture& first) {
  CaptureRequest other = request;
  std::vector<at::Tensor> values;
  {
    Session restore(request);  // keeps the random state
    for (auto& v : other.inputs) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      v = other_values(v.toTensor());
      values.push_back(v.toTensor());
    }
  }
  const OneCapture second = capture_once(other, options);
  auto differs = [](const std::string& what) {
    throw Error(
        ErrorKind::Capture, "verify: " + what, "",
        "the forward depends on tensor values in a way torch's dispatcher does not show (numpy, tolist, raw memory, "
        "tensor hooks, data-dependent Python code)");
  };
  if (comparable(first.module->graph()) != comparable(second.module->graph()))
    differs("two captures on different inputs gave different graphs");
  for (const Attr& attr : first.module->state()) {
    if (attr.kind != AttrKind::Constant) continue;
    const Attr* twin = second.module->state().find(attr.name);
    if (!twin || !equal_or_both_nan(attr.tensor, twin->tensor))
      differs("the constant '" + attr.name + "' depends on the inputs");
  }
  const auto eager = run_with_gradients(request, values, [&](const std::vector<c10::IValue>& in, Buffers& elsewhere) {
    TreeSpec spec;
    auto out = request.call(in, spec);
    if (request.buffers_after) elsewhere = request.buffers_after();
    if (request.attributes_after) request.attributes_after();
    return out;
  });
  const auto replay = run_with_gradients(
      request, values, [&](const std::vector<c10::IValue>& in, Buffers&) { return first.module->run(in); });
  if (eager.size() != replay.size()) differs("the graph has other gradients than eager");
  for (size_t i = 0; i < eager.size(); ++i) {
    if (!equal_or_both_nan(eager[i], replay[i]))
      differs("replay on other inputs differs from eager in tensor " + std::to_string(i));
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(plumb, m) { m.def("python_function(int id, Tensor[] inputs) -> Tensor[]", python_function); }

int64_t register_opaque(OpaqueFunction function, std::string name) {
  auto& table = opaque_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.functions.emplace_back(std::move(function), std::move(name));
  return static_cast<int64_t>(table.functions.size()) - 1;
}

std::string opaque_name(int64_t id) { return opaque(id).second; }

void push_module(std::string path, std::string type) {
  if (Session* s = Session::current()) s->module_stack.push_back({std::move(path), std::move(type)});
}

void pop_module() {
  Session* s = Session::current();
  if (s && !s->module_stack.empty()) s->module_stack.pop_back();
}

bool is_capturing() { return Session::current() != nullptr; }

void refuse_capture(const std::string& what, const std::string& remedy) {
  if (Session* s = Session::current()) s->refuse(what, remedy);
  throw Error(ErrorKind::Capture, what, "", remedy);
}

bool size_depends_on_values(const at::Tensor& tensor) {
  Session* s = Session::current();
  return s && s->has_dynamic_sizes(tensor);
}

void guard_size_read(const at::Tensor& tensor, bool exact) {
  if (Session* s = Session::current()) s->guard_size(tensor, exact);
}

at::Tensor guard_values_read(const at::Tensor& tensor) {
  Session* s = Session::current();
  return s ? s->guard_values(tensor) : at::Tensor();
}

namespace {

// In the order of a state_dict: a module's own parameters, its own buffers, its children.
void add_state(const torch::nn::Module& module, const std::string& prefix, State& state) {
  for (const auto& p : module.named_parameters(false)) {
    state.add({prefix + p.key(), AttrKind::Parameter, p.value(), true});
  }
  for (const auto& b : module.named_buffers(false)) state.add({prefix + b.key(), AttrKind::Buffer, b.value(), true});
  for (const auto& child : module.named_children()) add_state(*child.value(), prefix + child.key() + ".", state);
}

}  // namespace

State state_of(const torch::nn::Module& module) {
  State state;
  add_state(module, "", state);
  return state;
}

std::shared_ptr<GraphModule> capture(const CaptureRequest& request, const CaptureOptions& options) {
  OneCapture first = capture_once(request, options);
  if (options.verify) verify(request, options, first);
  if (options.notes) options.notes->insert(options.notes->end(), first.notes.begin(), first.notes.end());
  return first.module;
}

}  // namespace plumb
