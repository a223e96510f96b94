#include "plumb/graph/passes/fuse_patterns.h"

#include <map>
#include <string_view>
#include <unordered_set>

#include "plumb/graph/pass.h"
#include "plumb/graph/passes/layouts.h"
#include "plumb/graph/passes/pattern_rules.h"

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

// Returns the node that took the match's place, or null.
Node* apply(Graph& graph, const PatternRule& rule, Node* root) {
  auto match = rule.pattern.match(root, rule.through_casts);
  if (!match || !is_private(*match) || (rule.exact && !keeps_order_of_sums(*match))) return nullptr;
  Node* made = nullptr;
  {
    auto here = graph.inserting_before(root);
    made = rule.build(graph, *match);
  }
  if (!made) return nullptr;
  graph.replace_node(root, made);
  // Erases the root's former inputs that nothing uses any more; a part of another match may still be used.
  for (size_t i = match->nodes.size() - 1; i-- > 0;) {
    if (!is_used(*match->nodes[i])) graph.erase(match->nodes[i]);
  }
  return made;
}

const RegisterPass fuse_patterns_pass({
    "fuse_patterns",
    "Puts high-level operators back where a program wrote them as several (t + addmm: linear).",
    {{"inexact", "false", "also where the last bits change: bias of a matmul, silu, gelu, softmax, norms, attention"}},
    [](GraphModule& module, const PassOptions& options, std::vector<std::string>* report) {
      return fuse_patterns(module.graph(), {flag_option(options, "inexact", false)}, report);
    },
});

}  // namespace

bool fuse_patterns(Graph& graph, const FusePatternsOptions& options, std::vector<std::string>* report) {
  std::unordered_map<std::string_view, std::vector<const PatternRule*>> by_root;
  for (const PatternRule& rule : pattern_rules()) {
    if (rule.exact || options.inexact) by_root[rule.pattern.root_op()].push_back(&rule);
  }
  std::map<std::string, size_t> counts;
  for (Node* node = graph.first(); node; node = node->next()) {
    while (true) {
      auto rules = node->is_call() ? by_root.find(node->op_name()) : by_root.end();
      if (rules == by_root.end()) break;
      Node* made = nullptr;
      for (const PatternRule* rule : rules->second) {
        if ((made = apply(graph, *rule, node))) {
          ++counts[rule->name];
          break;
        }
      }
      if (!made) break;
      node = made;
    }
  }
  if (options.inexact && !counts.empty()) keep_views_working(graph);
  if (report) {
    for (const auto& [name, n] : counts) report->push_back("fused " + name + " " + std::to_string(n) + " times");
  }
  return !counts.empty();
}

}  // namespace plumb
