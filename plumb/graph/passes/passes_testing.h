// Helpers of the passes' tests: text in, text out, and "means the same" by running before and after.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"
#include "plumb/graph/graph_module.h"
#include "plumb/graph/pass.h"

namespace plumb {

// Returns a module whose state has a tensor for every get_attr: by the value's type where it is stated (parameter when
// it says grad, else buffer; constant when the name starts with "constant"), else ones of [4, 4].
inline GraphModule module_of(Graph graph) {
  State state;
  at::manual_seed(7);
  for (const Node* node : graph.attributes()) {
    if (state.contains(node->target())) continue;
    const auto& meta = node->result()->meta();
    at::Tensor t = meta ? at::empty(meta->sizes, meta->dtype) : at::ones({4, 4});
    if (meta && at::isFloatingType(meta->dtype)) t.normal_();
    if (meta && !at::isFloatingType(meta->dtype)) t.zero_();
    const bool grad = meta && meta->requires_grad;
    t.set_requires_grad(grad);
    const AttrKind kind = grad                                     ? AttrKind::Parameter
                          : node->target().starts_with("constant") ? AttrKind::Constant
                                                                   : AttrKind::Buffer;
    state.add({node->target(), kind, t});
  }
  const size_t n = graph.placeholders().size();
  const size_t outs = graph.output_node() ? graph.output_node()->args().size() : 0;
  TreeSpec out = outs == 1 ? TreeSpec::leaf() : TreeSpec::tuple(std::vector<TreeSpec>(outs, TreeSpec::leaf()));
  return GraphModule(std::move(graph), std::move(state), TreeSpec::positional_inputs(n), out);
}

// Runs a pass with every check on. A second run must return "unchanged".
inline bool run_checked(const std::string& pass, GraphModule& module, const PassOptions& options = {}) {
  const bool changed = run_pass(find_pass(pass), module, options, nullptr, true);
  EXPECT_FALSE(run_pass(find_pass(pass), module, options, nullptr, true)) << pass << " is not idempotent";
  return changed;
}

inline std::string graph_after(const std::string& pass, const std::string& text, const PassOptions& options = {}) {
  GraphModule module = module_of(parse_graph(text));
  run_checked(pass, module, options);
  return to_string(module.graph());
}

inline void expect_unchanged(const std::string& pass, const std::string& text, const PassOptions& options = {}) {
  EXPECT_EQ(graph_after(pass, text, options), to_string(parse_graph(text)));
}

// Everything a run shows: outputs, gradients of inputs and parameters, state afterwards, inputs afterwards.
struct Seen {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::string error;
};

inline Seen observe(GraphModule& module, const std::vector<at::Tensor>& inputs) {
  Seen seen;
  auto copy = module.deep_copy();
  std::vector<at::Tensor> leaves;
  std::vector<c10::IValue> given;
  try {
    for (const at::Tensor& x : inputs) {
      at::Tensor leaf = x.detach().clone();
      if (leaf.is_floating_point()) leaf.set_requires_grad(true);
      leaves.push_back(leaf);
      // Inputs may be written: what the graph gets is no leaf.
      given.emplace_back(leaf.requires_grad() ? leaf.clone() : leaf);
    }
    auto kept = given;
    at::manual_seed(11);
    auto outs = copy->run(given);
    // A view of what was written afterwards gets its node when it is asked for. If that were below, after a loss of
    // another output, the backward would sum in another order than that of a graph without writes.
    for (const c10::IValue& out : outs) {
      if (out.isTensor() && out.toTensor().defined()) out.toTensor().grad_fn();
    }
    at::Tensor loss;
    for (size_t i = 0; i < outs.size(); ++i) {
      if (!outs[i].isTensor()) continue;
      const at::Tensor out = outs[i].toTensor();
      seen.tensors.emplace_back("output " + std::to_string(i), out.detach().clone());
      if (!out.requires_grad()) continue;
      // Weights that differ by element, so that a transposed gradient would show.
      at::Tensor weight =
          at::arange(1, out.numel() + 1, out.options().requires_grad(false)).div(out.numel() + 1).view(out.sizes());
      at::Tensor part = (out * weight).sum().to(at::kDouble);
      loss = loss.defined() ? loss + part : part;
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      seen.tensors.emplace_back("input " + std::to_string(i) + " afterwards", kept[i].toTensor().detach().clone());
    }
    for (const Attr& attr : copy->state()) {
      if (attr.kind != AttrKind::Constant)
        seen.tensors.emplace_back(attr.name + " afterwards", attr.tensor.detach().clone());
    }
    seen.tensors.emplace_back("next random number", at::rand({1}));
    if (!loss.defined()) return seen;
    loss.backward();
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (leaves[i].requires_grad())
        seen.tensors.emplace_back("gradient of input " + std::to_string(i), leaves[i].grad());
    }
    for (const Attr& attr : copy->state()) {
      if (attr.tensor.requires_grad() && attr.tensor.is_leaf())
        seen.tensors.emplace_back("gradient of " + attr.name, attr.tensor.grad());
    }
  } catch (const c10::Error& e) {
    seen.error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    seen.error = e.what();
  }
  return seen;
}

// How exactly gradients have to agree. Outputs and state always agree bit for bit.
enum class Gradients {
  Equal,   // bit for bit
  Rounded  // as sums of another order: see functionalise.h
};

// Compares bit for bit, except the sign of zeros. Returns "" or what differs.
inline std::string difference(const Seen& a, const Seen& b, Gradients gradients = Gradients::Equal) {
  if (a.error.empty() != b.error.empty()) return "errors: '" + a.error + "' against '" + b.error + "'";
  if (!a.error.empty()) return "";
  if (a.tensors.size() != b.tensors.size()) return "another number of tensors";
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const auto& [name, x] = a.tensors[i];
    const at::Tensor& y = b.tensors[i].second;
    if (name != b.tensors[i].first) return name + " against " + b.tensors[i].first;
    if (x.defined() != y.defined()) return name + (x.defined() ? " became undefined" : " became defined");
    if (!x.defined()) continue;
    if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes()) return name + " has another type";
    at::Tensor same = x == y;
    if (x.is_floating_point()) same = same.logical_or(x.isnan().logical_and(y.isnan()));
    if (gradients == Gradients::Rounded && name.starts_with("gradient of") && x.numel() > 0) {
      const double largest = x.detach().nan_to_num(0, 0, 0).abs().max().item<double>();
      same = same.logical_or(x.isclose(y, 1e-4, 1e-5 * largest));
    }
    if (!same.all().item<bool>()) return name + " differs";
  }
  return "";
}

// Inputs for the placeholders, by their types.
inline std::vector<at::Tensor> sample_inputs(const Graph& graph, uint64_t seed = 3) {
  at::manual_seed(seed);
  std::vector<at::Tensor> inputs;
  for (const Node* node : graph.placeholders()) {
    const auto& meta = node->result()->meta();
    at::Tensor t = at::randn(meta ? meta->sizes : std::vector<int64_t>{4, 4});
    inputs.push_back(meta ? t.to(meta->dtype) : t);
  }
  return inputs;
}

// Runs the pass on the text, expects the other text, and that both mean the same, gradients included.
inline void expect_rewrite(const std::string& pass, const std::string& before, const std::string& after,
                           const PassOptions& options = {}) {
  GraphModule module = module_of(parse_graph(before));
  const auto inputs = sample_inputs(module.graph());
  const Seen was = observe(module, inputs);
  EXPECT_EQ(was.error, "");
  run_checked(pass, module, options);
  PrintOptions plain;
  plain.types = false;
  EXPECT_EQ(to_string(module.graph(), plain), to_string(parse_graph(after), plain));
  EXPECT_EQ(difference(was, observe(module, inputs)), "");
}

}  // namespace plumb
