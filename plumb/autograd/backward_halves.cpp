#include "plumb/autograd/backward_halves.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <ranges>
#include <set>

#include "plumb/autograd/backward_checkpoints.h"
#include "plumb/autograd/recompute/recompute.h"
#include "plumb/core/error.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

using torch::autograd::AccumulateGrad;

// Everything in the input half, for graphs with nodes that stand no other way: what reaches the leaves is set aside.
Tensors whole_backward_now(const BackwardRoots& roots, const BackwardGraph& graph, const std::vector<Edge>& inputs,
                           bool keep_graph, DeferredWeights::State& deferred) {
  struct Leaf {
    AccumulateGrad* node;
    at::Tensor before;
  };
  std::vector<Leaf> leaves;
  for (const auto& e : graph.entries) {
    auto* node = dynamic_cast<AccumulateGrad*>(e.node);
    if (node == nullptr) continue;
    if (node->tensor_post_acc_grad_hooks() != nullptr) {
      throw Error(ErrorKind::Unsupported,
                  "a weight " + describe(node->variable) +
                      " has a hook that runs after accumulation, and the stage writes into views or uses re-entrant "
                      "checkpoints: its backward cannot be divided",
                  "", "use a schedule with full backwards (1F1B, GPipe)");
    }
    leaves.push_back({node, node->variable.grad()});
    node->variable.mutable_grad() = at::Tensor();
  }
  std::vector<at::Tensor> taken(leaves.size());
  {
    const auto restore = c10::make_scope_exit([&] {
      for (size_t i = 0; i < leaves.size(); i++) {
        taken[i] = std::exchange(leaves[i].node->variable.mutable_grad(), leaves[i].before);
      }
    });
    run_engine(roots.edges, roots.grads, keep_graph);
  }
  Tensors input_grads(inputs.size());
  std::set<torch::autograd::Node*> is_input;
  for (size_t i = 0; i < inputs.size(); i++) {
    torch::autograd::Node* node = inputs[i].function.get();
    if (node == nullptr) continue;
    is_input.insert(node);
    if (auto* boundary = dynamic_cast<StageInputNode*>(node)) {
      if (inputs[i].input_nr < boundary->gradients.size()) input_grads[i] = boundary->gradients[inputs[i].input_nr];
    } else if (dynamic_cast<AccumulateGrad*>(node) == nullptr) {
      throw Error(ErrorKind::Unsupported,
                  "input " + std::to_string(i) +
                      " is not a leaf, and the stage writes into views or uses re-entrant "
                      "checkpoints",
                  "", "detach it before the stage's forward");
    }
  }
  for (size_t i = 0; i < leaves.size(); i++) {
    if (is_input.count(leaves[i].node)) {
      for (size_t k = 0; k < inputs.size(); k++) {
        if (inputs[k].function.get() == leaves[i].node) input_grads[k] = taken[i];
      }
    } else if (taken[i].defined()) {
      deferred.starts.push_back({Edge(leaves[i].node->getptr(), 0), std::move(taken[i]), true});
    }
  }
  return input_grads;
}

// Returns the node of the input half that hands its gradient to `leaf`, if it is one that runs only there.
NodePtr maker_of(const BackwardGraph& graph, torch::autograd::Node* leaf) {
  const int wanted = graph.index.at(leaf);
  for (const auto& e : graph.entries) {
    if (!e.in_input_half || e.twice) continue;
    const auto first = graph.children.begin() + e.first_child;
    if (std::find(first, first + e.num_children, wanted) != first + e.num_children) return e.node->getptr();
  }
  return nullptr;
}

// Runs `node` and all below it, each with the one gradient that comes to it. The engine does the same, and takes a
// microsecond a node for queues and thread-local state, which is as long as a small node runs.
void run_chains(NodePtr node, at::Tensor grad, bool keep_graph) {
  at::AutoGradMode off(false);
  std::vector<std::pair<NodePtr, at::Tensor>> ready;
  ready.emplace_back(std::move(node), std::move(grad));
  while (!ready.empty()) {
    auto [next, incoming] = std::move(ready.back());
    ready.pop_back();
    variable_list grads{std::move(incoming)};
    for (const auto& hook : next->tensor_pre_hooks()) grads = (*hook)(grads);
    for (const auto& hook : next->pre_hooks()) grads = (*hook)(grads);
    variable_list made = (*next)(variable_list(grads));
    torch::autograd::validate_outputs(next->next_edges(), made, [&](const std::string& message) {
      return "Function " + next->name() + " returned an " + message;
    });
    for (const auto& hook : next->post_hooks()) made = (*hook)(made, grads);
    if (!keep_graph) {
      next->release_variables();
      drop_recipes(*next);
    }
    for (size_t i = 0; i < made.size(); i++) {
      const Edge& edge = next->next_edge(i);
      if (edge.function && made[i].defined()) ready.emplace_back(edge.function, std::move(made[i]));
    }
  }
}

// After the last use of these nodes: what they saved, and then they themselves, need not wait for the weight half.
void release_input_half(const BackwardGraph& graph, DeferredWeights::State& deferred) {
  for (const auto& e : graph.entries) {
    if (!e.in_input_half || e.start) continue;
    e.node->release_variables();
    drop_recipes(*e.node);
  }
  std::vector<Edge> dropped;  // lets nodes go only when all cuts are made
  for (const auto& cut : deferred.cuts) {
    dropped.push_back(std::exchange(cut.node->next_edges()[cut.index], Edge()));
  }
  deferred.cuts.clear();
}

}  // namespace

InputHalf run_input_half(const BackwardRoots& roots, const std::vector<Edge>& inputs, bool keep_graph) {
  InputHalf half;
  half.input_grads.resize(inputs.size());
  if (roots.edges.empty()) return half;
  half.deferred.state = std::make_shared<DeferredWeights::State>();
  DeferredWeights::State& deferred = *half.deferred.state;
  BackwardGraph graph = walk_backward(roots.edges, inputs);
  if (graph.indivisible) {
    half.input_grads = whole_backward_now(roots, graph, inputs, keep_graph, deferred);
    return half;
  }
  KeptFromCheckpoints kept(graph);
  divide(graph);
  deferred.chains = defers_chains(graph, roots.edges);
  kept.watch(graph);

  edge_list first_edges, wanted;
  variable_list first_grads;
  for (size_t i = 0; i < roots.edges.size(); i++) {
    const auto& e = *graph.find(roots.edges[i].function.get());
    if (e.target || e.in_input_half) {
      first_edges.push_back(roots.edges[i]);
      first_grads.push_back(roots.grads[i]);
    } else {
      deferred.starts.push_back({roots.edges[i], roots.grads[i], false});
    }
  }
  std::vector<size_t> wanted_input;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i].function || !graph.find(inputs[i].function.get())) continue;
    wanted.push_back(inputs[i]);
    wanted_input.push_back(i);
  }
  for (const auto& e : graph.entries) {
    if (!e.start) continue;
    for (uint32_t k = 0; k < e.node->num_inputs(); k++) wanted.emplace_back(e.node->getptr(), k);
    if (!e.in_input_half) continue;
    for (size_t k = 0; k < static_cast<size_t>(e.num_children); k++) {
      const int c = graph.children[e.first_child + k];
      if (c >= 0 && (graph.entries[c].target || graph.entries[c].in_input_half)) {
        deferred.cuts.push_back({e.node->getptr(), k, Edge()});
      }
    }
  }
  if (!first_edges.empty()) {
    variable_list grads = run_engine(first_edges, first_grads, /*keep_graph=*/true, wanted);
    for (size_t i = 0; i < wanted_input.size(); i++) half.input_grads[wanted_input[i]] = std::move(grads[i]);
    for (size_t i = wanted_input.size(); i < wanted.size(); i++) {
      if (!grads[i].defined()) continue;
      const auto& e = *graph.find(wanted[i].function.get());
      deferred.starts.push_back({wanted[i], std::move(grads[i]), !e.in_input_half});
      if (!e.in_input_half) deferred.starts.back().maker = maker_of(graph, wanted[i].function.get());
    }
  }
  for (const auto& e : graph.entries) drop_recomputed(*e.node);
  if (!keep_graph) release_input_half(graph, deferred);
  return half;
}

void run_weight_half(DeferredWeights::State& deferred, const edge_list& only, bool retain_graph) {
  edge_list edges;
  variable_list grads;
  for (auto& s : deferred.starts) {
    edges.push_back(s.edge);
    grads.push_back(retain_graph ? s.grad : std::move(s.grad));
  }
  // Hooks that have run, and edges into the input half, are away while the weight half runs.
  const auto swap_hooks = [](DeferredWeights::State::Start& start) {
    if (!start.hooks_done) return;
    std::swap(start.edge.function->tensor_pre_hooks(), start.pre_hooks);
    std::swap(start.edge.function->retains_grad_hooks(), start.retains_grad);
  };
  const auto swap_edge = [](auto& cut) { std::swap(cut.node->next_edges()[cut.index], cut.edge); };
  std::ranges::for_each(deferred.starts, swap_hooks);
  std::ranges::for_each(deferred.cuts, swap_edge);
  const auto back = c10::make_scope_exit([&] {
    std::ranges::for_each(std::views::reverse(deferred.starts), swap_hooks);
    std::ranges::for_each(deferred.cuts, swap_edge);
  });
  if (deferred.chains && only.empty() && !torch::autograd::AnomalyMode::is_enabled()) {
    for (size_t i = 0; i < edges.size(); i++) run_chains(edges[i].function, std::move(grads[i]), retain_graph);
  } else if (!edges.empty()) {
    run_engine(edges, grads, retain_graph, only, IntoGrad::Yes);
  }
}

}  // namespace plumb
