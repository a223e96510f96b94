#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "plumb/capture/session.h"
#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"

namespace plumb {
namespace {

// beta * self + ..., of which torch does not read `self` where beta is zero.
bool is_unread(const Node& node, const Value* value) {
  static const std::unordered_set<std::string_view> with_beta = {"aten::baddbmm", "aten::addmm", "aten::addbmm",
                                                                 "aten::addmv", "aten::addr"};
  if (!with_beta.count(node.op_name()) || node.args()[0].value() != value) return false;
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
  // Memory that is still as `empty` left it, and the views that show it.
  std::unordered_map<const Value*, const Value*> base;
  std::unordered_set<const Value*> unwritten;
  auto base_of = [&](const Value* v) {
    auto it = base.find(v);
    return it == base.end() ? v : it->second;
  };
  for (const Node* node : graph.nodes()) {
    if (!node->is_call()) continue;
    const std::string_view name = node->op_name();
    if (is_uninitialised(*node) && !node->writes()) {
      const auto& meta = node->result()->meta();
      if (!meta || meta->numel() > 0) unwritten.insert(node->result());
      continue;
    }
    const auto written = node->writes() && name != "aten::detach_" && name != "aten::resize_" ? node->written_inputs()
                                                                                              : std::vector<Value*>{};
    for (const Value* v : written) unwritten.erase(base_of(v));
    for (const Value* v : node->inputs()) {
      const Value* root = base_of(v);
      if (!unwritten.count(root)) continue;
      if (node->result_aliases_input()) {
        for (const Value* r : node->results()) base.emplace(r, root);
        continue;
      }
      if (looks_at_shape_only(*node) || is_unread(*node, v)) continue;
      throw Error(ErrorKind::Capture,
                  node->describe() +
                      " reads memory made by torch.empty that no operator has written: it was filled outside of "
                      "torch's sight (numpy, raw pointer)",
                  node->meta().where(),
                  "fill it with torch operators, or make it with torch.tensor / torch.from_numpy");
    }
    if (!written.empty()) {
      for (const Value* r : node->results()) base.emplace(r, base_of(written[0]));
    }
  }
}

}  // namespace plumb
