#include "plumb/capture/verify.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <sstream>

#include "plumb/core/error.h"
#include "plumb/graph/module_state_guard.h"
#include "plumb/tensors/node_seeds.h"

namespace plumb {
namespace {

// Other values of the same dtype and shape. Integers, if they are to change, are permuted: they stay valid indices.
at::Tensor other_values(const at::Tensor& t, bool integers) {
  at::NoGradGuard no_grad;
  if (t.device().is_meta()) return t.detach().clone();
  if (t.is_floating_point()) return (at::randn_like(t, at::MemoryFormat::Preserve) * 3 - 1).to(t.scalar_type());
  if (t.numel() < 2 || t.scalar_type() == at::kBool || !integers) return t.detach().clone();
  return t.flatten().flip(0).view(t.sizes()).clone();
}

bool equal_or_both_nan(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.device().is_meta()) return true;
  if (a.layout() != b.layout()) return false;
  if (a.layout() != at::kStrided) return equal_or_both_nan(a.to_dense(), b.to_dense());
  if (at::equal(a, b)) return true;
  if (!a.is_floating_point()) return false;
  return at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(), b.nan_to_num());
}

using Buffers = std::vector<std::pair<std::string, at::Tensor>>;

struct Result {
  std::string what;  // "output 0"
  at::Tensor tensor;
};

// Runs with these inputs and returns outputs, gradients of inputs and parameters, and the state afterwards. `call`
// may name buffers that it holds in other tensors than the state's. `as_given`: inputs require a gradient as the
// request's do; all of floating point otherwise.
std::vector<Result> run_with_gradients(
    const CaptureRequest& request, const std::vector<at::Tensor>& inputs, bool as_given,
    const std::function<std::vector<c10::IValue>(const std::vector<c10::IValue>&, Buffers&)>& call) {
  const ModuleStateGuard restore(request.state, request.inputs);
  at::AutoGradMode grad(true);
  seed_all_generators(1234);
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;  // descriptions of the leaves' gradients
  auto watch = [&](const at::Tensor& leaf, const std::string& name) {
    if (!leaf.requires_grad()) return;
    leaves.push_back(leaf);
    names.push_back("the gradient of " + name);
  };
  std::vector<c10::IValue> fed;
  size_t next = 0;
  for (const auto& v : request.inputs) {
    if (!v.isTensor() || !v.toTensor().defined()) {
      fed.push_back(v);
      continue;
    }
    at::Tensor leaf = inputs[next++].detach();
    if (leaf.is_floating_point()) leaf.requires_grad_(!as_given || v.toTensor().requires_grad());
    watch(leaf, "input " + std::to_string(next - 1));
    fed.emplace_back(leaf.clone());
  }
  std::map<std::string, at::Tensor> saved;
  for (const Attr& attr : request.state) {
    if (attr.tensor.defined()) saved[attr.name] = attr.tensor.detach().clone();
    if (attr.kind == AttrKind::Parameter && attr.tensor.defined()) watch(attr.tensor, "'" + attr.name + "'");
  }
  const auto put_back = c10::make_scope_exit([&] {
    const at::NoGradGuard no_grad;
    for (const Attr& attr : request.state) {
      // A forward that resizes a tensor has failed already.
      if (attr.tensor.defined() && attr.tensor.sizes() == saved.at(attr.name).sizes())
        attr.tensor.detach().copy_(saved.at(attr.name));
    }
  });
  Buffers elsewhere;
  auto outputs = call(fed, elsewhere);
  std::vector<Result> results;
  std::vector<at::Tensor> roots, seeds;
  for (const auto& v : outputs) {
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    results.push_back({"output " + std::to_string(results.size()), v.toTensor().detach().clone()});
    if (v.toTensor().requires_grad()) {
      roots.push_back(v.toTensor());
      seeds.push_back(at::ones_like(v.toTensor()));
    }
  }
  if (!roots.empty() && !leaves.empty()) {
    try {
      const auto grads = torch::autograd::grad(roots, leaves, seeds, std::nullopt, false, /*allow_unused=*/true);
      for (size_t i = 0; i < grads.size(); ++i) results.push_back({names[i], grads[i]});
    } catch (const c10::Error& error) {
      throw Error(ErrorKind::Capture, std::string("verify: the backward fails: ") + error.what_without_backtrace(), "",
                  "mend the forward, or capture without verifying one that is never trained");
    }
  }
  at::NoGradGuard no_grad;
  for (const Attr& attr : request.state) {
    if (!attr.tensor.defined()) continue;
    at::Tensor now = attr.tensor;
    for (const auto& [name, tensor] : elsewhere) {
      if (name == attr.name) now = tensor;
    }
    results.push_back({"'" + attr.name + "' after the run", now.detach().clone()});
  }
  return results;
}

// Returns the graph's text without what may differ although the program is the same: numbers of Python functions, and
// sizes that depend on the data.
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

// Returns the first operator that the other graph does not have in its place, if it shows by its name or its results.
const Node* first_difference(const Graph& graph, const Graph& other) {
  const auto others = other.nodes();
  auto it = others.begin();
  for (const Node* node : graph.nodes()) {
    if (!(it != others.end())) return node;
    const Node* twin = *it;
    ++it;
    if (!node->is_call() && !twin->is_call()) continue;
    bool equal = node->target() == twin->target() && node->num_results() == twin->num_results();
    for (size_t i = 0; equal && i < node->num_results(); ++i) {
      const auto &a = node->result(i)->meta(), &b = twin->result(i)->meta();
      equal = a.has_value() == b.has_value() && (!a || a->sizes == b->sizes);
    }
    if (!equal) return node;
  }
  return nullptr;
}

using CaptureAgain = std::function<std::shared_ptr<GraphModule>(const CaptureRequest&)>;

// Returns a graph captured on other values of the inputs, which come into `values`.
std::shared_ptr<GraphModule> capture_on_other_values(const CaptureRequest& request, const CaptureAgain& capture_again,
                                                     std::vector<at::Tensor>& values) {
  CaptureRequest other = request;
  const auto change_inputs = [&](bool integers) {
    const ModuleStateGuard restore(request.state, request.inputs);  // keeps the random state
    values.clear();
    other.inputs = request.inputs;
    for (auto& v : other.inputs) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      const bool grad = v.toTensor().requires_grad();
      values.push_back(other_values(v.toTensor(), integers));
      v = values.back().detach().requires_grad_(grad);
    }
  };
  // The model itself may check integers (offsets that begin with zero): then they keep their values.
  for (const bool integers : {true, false}) {
    change_inputs(integers);
    try {
      return capture_again(other);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (integers) continue;
      const std::string words = error.what();
      throw Error(ErrorKind::Capture,
                  "verify: the forward fails on other values of its inputs: " + words.substr(0, words.find('\n')), "",
                  "capture without verifying a forward that takes only some values, such as a table's positions");
    }
  }
  return nullptr;
}

}  // namespace

std::optional<std::string> difference_of(const Graph& graph, const Graph& other) {
  if (comparable(graph) == comparable(other)) return std::nullopt;
  const Node* node = first_difference(graph, other);
  return node ? ", from " + std::string(node->target()) + " on" : "";
}

void verify_capture(const CaptureRequest& request, GraphModule& first,
                    const std::function<std::shared_ptr<GraphModule>(const CaptureRequest&)>& capture_again) {
  std::vector<at::Tensor> values;
  const auto second = capture_on_other_values(request, capture_again, values);
  auto differs = [](const std::string& what, const std::string& where = "") {
    throw Error(
        ErrorKind::Capture, "verify: " + what, where,
        "the forward depends on tensor values in a way torch's dispatcher does not show (numpy, tolist, raw memory, "
        "tensor hooks, data-dependent Python code)");
  };
  if (const auto from = difference_of(first.graph(), second->graph())) {
    const Node* node = first_difference(first.graph(), second->graph());
    differs("two captures on different inputs gave different graphs" + *from, node ? node->meta().where() : "");
  }
  for (const Attr& attr : first.state()) {
    if (attr.kind != AttrKind::Constant) continue;
    const Attr* twin = second->state().find(attr.name);
    if (!twin || !equal_or_both_nan(attr.tensor, twin->tensor))
      differs("the constant '" + attr.name + "' depends on the inputs");
  }
  bool asks = false;  // a custom function may, by its needs_input_grad
  for (const Node* node : first.graph().nodes())
    asks |= node->is_op("plumb::guard_requires_grad") || node->is_op("plumb::python_function");
  const auto eager =
      run_with_gradients(request, values, asks, [&](const std::vector<c10::IValue>& in, Buffers& elsewhere) {
        TreeSpec spec;
        auto out = request.call(in, spec);
        if (request.buffers_after) elsewhere = request.buffers_after();
        return out;
      });
  if (request.attributes_after) request.attributes_after();  // a function's backward may read what its forward left
  const auto replay = run_with_gradients(request, values, asks,
                                         [&](const std::vector<c10::IValue>& in, Buffers&) { return first.run(in); });
  if (eager.size() != replay.size()) differs("the graph has other gradients than eager");
  for (size_t i = 0; i < eager.size(); ++i) {
    if (!equal_or_both_nan(eager[i].tensor, replay[i].tensor))
      differs("the graph on other inputs differs from eager in " + eager[i].what);
  }
}

}  // namespace plumb
