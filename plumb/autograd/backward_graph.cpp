#include "plumb/autograd/backward_graph.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "plumb/autograd/node_names.h"
#include "plumb/autograd/recompute/recompute.h"

namespace plumb {
namespace {

struct Kind {
  bool pure, indivisible, plain;
};

Kind find_kind(torch::autograd::Node& node) {
  Kind kind{false, false, false};
  try {
    kind.pure = node.is_traceable();
  } catch (const std::exception&) {
    // Python's functions cannot be asked.
  }
  if (node_names::is_group_norm(node)) kind.pure = false;
  if (!kind.pure) {
    kind.pure = node_names::is_cpp_function_of_plumb(node);
    kind.indivisible = node_names::needs_whole_backward(node);
  }
  // Views are generated from ATen's formulas as other operators are, but not called pure.
  kind.plain =
      kind.pure || node_names::is_generated(node) || dynamic_cast<torch::autograd::AccumulateGrad*>(&node) != nullptr;
  return kind;
}

// By the node's class: names are demangled, which takes longer than the rest of the walk, and so would a hash of names.
Kind kind_of(torch::autograd::Node& node) {
  static thread_local ska::flat_hash_map<const std::type_info*, Kind> known;
  const std::type_info& type = typeid(node);
  if (auto it = known.find(&type); it != known.end()) return it->second;
  const Kind kind = find_kind(node);
  if (!node_names::is_python_function(node)) known.emplace(&type, kind);
  return kind;
}

bool has_hooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         node.tensor_post_acc_grad_hooks() != nullptr || !has_no_hooks_but_recipes(node);
}

}  // namespace

BackwardGraph walk_backward(const edge_list& roots, const std::vector<Edge>& inputs) {
  constexpr size_t kOften = 256;
  BackwardGraph graph;
  graph.entries.reserve(kOften);
  graph.children.reserve(kOften);
  graph.index.reserve(kOften);
  ska::flat_hash_set<torch::autograd::Node*> input_nodes;
  for (const auto& edge : inputs) {
    if (edge.function) input_nodes.insert(edge.function.get());
  }
  struct Open {
    torch::autograd::Node* node;
    size_t next;
    bool is_input;
  };
  std::vector<Open> stack;
  constexpr int kOpen = -2;
  auto open = [&](torch::autograd::Node* node) {
    if (!graph.index.emplace(node, kOpen).second) return;
    stack.push_back({node, 0, input_nodes.count(node) != 0});
  };
  for (const auto& root : roots) {
    open(root.function.get());
    while (!stack.empty()) {
      auto& [node, next, is_input] = stack.back();
      const auto& edges = node->next_edges();
      if (!is_input && next < edges.size()) {
        if (torch::autograd::Node* child = edges[next++].function.get()) open(child);
        continue;
      }
      BackwardGraph::Entry entry{node, static_cast<int>(graph.children.size()), static_cast<int>(edges.size())};
      entry.target = is_input;
      for (const auto& edge : edges) {
        graph.children.push_back(is_input || !edge.function ? -1 : graph.index.find(edge.function.get())->second);
      }
      if (!is_input) {
        // Built-in nodes are pure functions of what they saved and compute only what is asked for, so running one once
        // for its input and once for its weights costs and gives the same as running it once. So are plumb's own.
        const Kind kind = kind_of(*node);
        entry.twice = kind.pure && !has_hooks(*node);
        graph.indivisible = graph.indivisible || kind.indivisible;
        // On another device the engine chooses streams.
        entry.by_itself = kind.plain && node->num_inputs() == 1 && !node->stream() && !has_hooks(*node);
      }
      graph.index.find(node)->second = static_cast<int>(graph.entries.size());
      graph.entries.push_back(entry);
      stack.pop_back();
    }
  }
  return graph;
}

void divide(BackwardGraph& graph) {
  auto& entries = graph.entries;
  auto runs_first = [&](int child) { return child >= 0 && (entries[child].target || entries[child].in_input_half); };
  // A node that may not run twice pulls all its children into the input half, and by that more nodes above them.
  for (bool changed = true; changed;) {
    changed = false;
    for (auto& e : entries) {
      const int* child = graph.children.data() + e.first_child;
      e.in_input_half = e.in_input_half || std::any_of(child, child + e.num_children, runs_first);
      if (!e.in_input_half || e.twice) continue;
      for (int k = 0; k < e.num_children; k++) {
        if (child[k] < 0 || runs_first(child[k])) continue;
        entries[child[k]].target = entries[child[k]].start = changed = true;
      }
    }
  }
  for (auto& e : entries) {
    if (!e.in_input_half) continue;
    const int* child = graph.children.data() + e.first_child;
    e.start = e.twice && std::any_of(child, child + e.num_children, [&](int c) { return c >= 0 && !runs_first(c); });
  }
}

bool defers_chains(const BackwardGraph& graph, const edge_list& roots) {
  const auto& entries = graph.entries;
  std::vector<char> reached(entries.size());
  auto reach = [&](int entry) { return std::exchange(reached[entry], 1) == 0; };
  for (const Edge& root : roots) {
    const int entry = graph.index.find(root.function.get())->second;
    if (entries[entry].runs_in_weight_half() && !reach(entry)) return false;
  }
  for (const auto& e : entries) {
    if (!e.runs_in_weight_half()) continue;
    if (!e.by_itself) return false;
    for (int k = 0; k < e.num_children; k++) {
      const int child = graph.children[e.first_child + k];
      if (child < 0 || entries[child].target || entries[child].in_input_half) continue;
      if (!reach(child)) return false;
    }
  }
  return true;
}

}  // namespace plumb
