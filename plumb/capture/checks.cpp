#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>
#include <unordered_set>

#include "plumb/capture/session.h"
#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"

namespace plumb {
namespace {

// Returns whether this first operand may be memory that nothing has written: in beta * self + ... with a beta of zero,
// and where all or a part of it is replaced (the operators in place count as writing it).
bool is_unread(const Node& node, const Value* value) {
  static const std::unordered_set<std::string_view> with_beta = {"aten::baddbmm", "aten::addmm", "aten::addbmm",
                                                                 "aten::addmv", "aten::addr"};
  static const std::unordered_set<std::string_view> replaced = {"aten::fill",
                                                                "aten::copy",
                                                                "aten::zero",
                                                                "aten::index_put",
                                                                "aten::select_scatter",
                                                                "aten::slice_scatter",
                                                                "aten::diagonal_scatter"};
  if (node.args().empty() || node.args()[0].value() != value) return false;
  if (replaced.count(node.op_name())) return true;
  if (!with_beta.count(node.op_name())) return false;
  const Arg& beta = node.arg("beta");
  return beta.is_constant() && beta.constant().isScalar() && beta.constant().toScalar().equal(0);
}

}  // namespace

void Session::refuse_gradients() {
  const auto refuse = [&](const std::string& name) {
    recorder.refuse(
        "the forward runs a backward that leaves a gradient in '" + name + "', which a run of a graph does not",
        "torch.autograd.grad, which returns the gradients of what it is asked for and leaves none");
  };
  const at::Tensor changed = module_state_.find_changed_gradient();
  for (const Attr& attr : request.state) {
    if (changed.defined() && attr.tensor.is_same(changed)) refuse(attr.name);
  }
  for (size_t i = 0; i < recorder.fed.size(); ++i) {
    if (recorder.fed[i].is_leaf() && recorder.fed[i].grad().defined()) refuse("input " + std::to_string(i));
  }
}

void Session::refuse_seeds() {
  if (!module_state_.was_seeded()) return;
  recorder.refuse("the forward sets torch's random state, and a graph draws from the state that it finds",
                  "set it before the call; for draws that stay the same keep them in a buffer");
}

void refuse_hooks(CallRecorder& recorder, const std::vector<c10::IValue>& outputs) {
  using torch::autograd::Node;
  std::vector<Node*> left;
  for (const c10::IValue& out : outputs) {
    if (out.isTensor() && out.toTensor().defined()) left.push_back(out.toTensor().grad_fn().get());
  }
  std::unordered_set<Node*> seen;
  while (!left.empty()) {
    Node* node = left.back();
    left.pop_back();
    // Hooks of parameters are the parameters' own, and go on.
    if (!node || !seen.insert(node).second || dynamic_cast<torch::autograd::AccumulateGrad*>(node)) continue;
    // plumb's own hooks are of other types: their operators' replay makes them again.
    const auto& hooks = node->tensor_pre_hooks();
    if (std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
          return std::string_view(typeid(*hook).name()).find("CppFunction") != std::string_view::npos;
        })) {
      recorder.refuse(
          "the forward registers a hook on a gradient (at " + node->name() + "), which a graph would not call",
          "write it as a custom autograd function, or register the hook on the model's output or on a "
          "parameter");
    }
    for (const auto& edge : node->next_edges()) left.push_back(edge.function.get());
  }
}

void refuse_unwritten_reads(const Graph& graph) {
  UninitialisedMemory memory;
  for (const Node* node : graph.nodes()) {
    memory.pass(*node);
    if (!node->is_call() || is_uninitialised(*node) || node->result_aliases_input() || looks_at_shape_only(*node))
      continue;
    for (const Value* v : node->inputs()) {
      if (!memory.is_unwritten(v) || is_unread(*node, v)) continue;
      throw Error(ErrorKind::Capture,
                  node->describe() +
                      " reads memory made by torch.empty that no operator has written: it was filled outside of "
                      "torch's sight (numpy, raw pointer)",
                  node->meta().where(),
                  "fill it with torch operators, or make it with torch.tensor / torch.from_numpy");
    }
  }
}

}  // namespace plumb
