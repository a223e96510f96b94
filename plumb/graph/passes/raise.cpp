#include "plumb/graph/passes/raise.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <unordered_set>

#include "plumb/graph/operator_facts.h"
#include "plumb/graph/passes/raise_rules.h"
#include "plumb/graph/passes/tools.h"

namespace plumb {
namespace {

// Moving an operator later in the graph moves its gradient in the sum of all gradients of its input. The bits stay if
// nobody else uses that input in between, or if there are but two to add.
bool keeps_order_of_sums(const Match& match) {
  std::unordered_set<const Value*> watched;
  for (const auto& [name, arg] : match.bound) {
    if (arg.is_value() && arg.value()->uses().size() > 2) watched.insert(arg.value());
  }
  if (watched.empty()) return true;
  const std::unordered_set<const Node*> inside(match.nodes.begin(), match.nodes.end());
  for (const Node* node = match.nodes.front(); node != match.root; node = node->next()) {
    if (inside.count(node)) continue;
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      if (watched.count(node->input(i))) return false;
    }
  }
  return true;
}

// The dimensions from the largest stride to the smallest; none if the strides are not those of dense memory.
std::optional<std::vector<int64_t>> memory_order(const TensorMeta& type) {
  if (!type.symbols.empty() || type.strides.size() != type.sizes.size()) return std::nullopt;
  std::vector<int64_t> order(type.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return type.strides[static_cast<size_t>(a)] > type.strides[static_cast<size_t>(b)];
  });
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    if (type.sizes[d] != 1 && type.strides[d] != stride) return std::nullopt;
    stride *= type.sizes[d];
  }
  return order;
}

TensorMeta permuted(TensorMeta type, const std::vector<int64_t>& order) {
  const TensorMeta old = type;
  for (size_t i = 0; i < order.size(); ++i) {
    type.sizes[i] = old.sizes[static_cast<size_t>(order[i])];
    if (!old.strides.empty()) type.strides[i] = old.strides[static_cast<size_t>(order[i])];
  }
  return type;
}

// Whether an operator behind the value, or behind views of it, fails for other strides.
bool needs_strides(const Value* value) {
  for (std::vector<const Value*> left{value}; !left.empty();) {
    const Value* v = left.back();
    left.pop_back();
    for (const Node* user : v->users()) {
      if (!user->is_call() || user->num_inputs() == 0 || user->input(0) != v) continue;
      if (user->is_op("aten::view") || user->is_op("aten::as_strided") || user->is_op("aten::view_as_complex"))
        return true;
      if (!operator_facts(user->target()).plain_view) continue;
      for (const Value* view : user->results()) left.push_back(view);
    }
  }
  return false;
}

// Spelled-out norms and softmaxes lay their results out as their inputs are, the operators make rows; a spelled-out
// attention makes rows, the operator heads. Answers the node whose result has the strides of the root's.
Node* laid_out_as(Graph& graph, Node* root, Node* made) {
  const bool attention = made->is_op("aten::scaled_dot_product_attention");
  const bool rows = made->is_op("aten::rms_norm") || made->is_op("aten::layer_norm") || made->is_op("aten::softmax");
  const auto& want = root->result()->meta();
  const auto order = (attention || rows) && want ? memory_order(*want) : std::nullopt;
  if (!order || !needs_strides(root->result())) return made;
  if (attention) {
    if (!want->is_contiguous()) return made;
    return graph.call("aten::contiguous", {made->result()});
  }
  // The operators work along the last dimension, which has to stay the last.
  Value* x = made->input(0);
  if (std::is_sorted(order->begin(), order->end()) || order->back() + 1 != static_cast<int64_t>(order->size()) ||
      !x->meta() || x->meta()->sizes.size() != order->size())
    return made;
  {
    auto before = graph.inserting_before(made);
    Node* there = graph.call("aten::permute", {x, c10::IValue(*order)});
    there->result()->set_meta(permuted(*x->meta(), *order));
    made->set_input(0, there->result());
  }
  made->result()->set_meta(permuted(*want, *order));
  std::vector<int64_t> back(order->size());
  for (size_t i = 0; i < order->size(); ++i) back[static_cast<size_t>((*order)[i])] = static_cast<int64_t>(i);
  return graph.call("aten::permute", {made->result(), c10::IValue(back)});
}

// Null, or the node that took the match's place.
Node* apply(Graph& graph, const RaiseRule& rule, Node* root) {
  auto match = rule.pattern.match(root);
  if (!match || !is_private(*match) || (rule.exact && !keeps_order_of_sums(*match))) return nullptr;
  Node* made = nullptr;
  {
    auto here = graph.inserting_before(root);
    made = rule.build(graph, *match);
    if (made && !rule.exact) {
      Node* last = laid_out_as(graph, root, made);
      if (last != made) made->meta() = root->meta();
      made = last;
    }
  }
  if (!made) return nullptr;
  graph.replace_node(root, made);
  // What fed the root and is not needed any more; another rule's piece may still be.
  for (size_t i = match->nodes.size() - 1; i-- > 0;) {
    if (!is_used(*match->nodes[i])) graph.erase(match->nodes[i]);
  }
  return made;
}

const RegisterPass raise_pass({
    "raise",
    "Puts high-level operators back where a program wrote them as several (t + addmm: linear).",
    {{"inexact", "false", "also where the last bits change: bias of a matmul, silu, gelu, softmax, norms, attention"}},
    [](GraphModule& module, const PassOptions& options, std::vector<std::string>* report) {
      return raise_operators(module.graph(), {flag_option(options, "inexact", false)}, report);
    },
});

}  // namespace

bool raise_operators(Graph& graph, const RaiseOptions& options, std::vector<std::string>* report) {
  std::unordered_map<std::string_view, std::vector<const RaiseRule*>> by_root;
  for (const RaiseRule& rule : raise_rules()) {
    if (rule.exact || options.inexact) by_root[rule.pattern.root_op()].push_back(&rule);
  }
  std::map<std::string, size_t> counts;
  for (Graph* g : every_graph(graph)) {
    for (Node* node = g->first(); node; node = node->next()) {
      while (true) {
        auto rules = node->is_call() ? by_root.find(node->op_name()) : by_root.end();
        if (rules == by_root.end()) break;
        Node* made = nullptr;
        for (const RaiseRule* rule : rules->second) {
          if ((made = apply(*g, *rule, node))) {
            ++counts[rule->name];
            break;
          }
        }
        if (!made) break;
        node = made;
      }
    }
  }
  if (report) {
    for (const auto& [name, n] : counts) report->push_back("raised " + name + " " + std::to_string(n) + " times");
  }
  return !counts.empty();
}

}  // namespace plumb
