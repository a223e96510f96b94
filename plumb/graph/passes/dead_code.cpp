#include "plumb/graph/passes/dead_code.h"

#include <algorithm>
#include <array>
#include <unordered_set>
#include <vector>

#include "plumb/graph/aliases.h"
#include "plumb/graph/pass.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

bool must_stay(const Node& node, const DeadCodeOptions& options) {
  if (node.kind() == NodeKind::Placeholder || node.kind() == NodeKind::Output) return true;
  return has_hidden_effects(node) || (!options.remove_random && node.is_random());
}

// One walk from the end: whether a node is live depends only on what comes after it.
class Sweep {
 public:
  Sweep(Graph& graph, const State* state, const DeadCodeOptions& options)
      : graph_(graph), aliases_(graph, state), flow_(graph, aliases_, state), options_(options) {
    for (const Node* node : graph.nodes()) {
      positions_.emplace(node, positions_.size());
      const auto& written = aliases_.written(node);
      for (Aliases::Memory m : written) writes_[m].push_back(positions_.size() - 1);
      if (!node->is_call() || node->num_results() != 1 || node->args().empty() || !node->arg(0).is_value()) continue;
      const Value* input = node->arg(0).value();
      if (!written.empty()) same_[node->result()] = same(input);
      const bool may_hand_back = node->result_aliases_input() && !node->facts().plain_view;
      if (may_hand_back && aliases_.may_alias(node->result(), input)) first_[node->result()] = first(input);
    }
  }

  bool run() {
    bool changed = false;
    for (Node* node = graph_.last(); node;) {
      Node* previous = node->prev();
      if (is_live(*node)) {
        for (Aliases::Memory m : aliases_.read(node)) seen_.insert(m);
        for (size_t i = 0; i < node->num_inputs(); ++i) {
          for (const Value* v : tensors_of(node->input(i))) read_.insert(v);
        }
      } else {
        graph_.erase(node);
        changed = true;
      }
      node = previous;
    }
    return changed;
  }

 private:
  bool is_live(const Node& node) const {
    if (must_stay(node, options_)) return true;
    if (is_used(node)) return true;
    for (Aliases::Memory m : aliases_.written(&node)) {
      if (aliases_.is_external(m) || seen_.count(m)) return true;
    }
    return renews_history(node);
  }

  // Reading a view whose memory was written since it was made lets eager make the view's history anew, there and then.
  // If the view is read again, the order in which its gradients are summed depends on the first read, dead or not.
  bool renews_history(const Node& node) const {
    if (!node.meta().grad_enabled) return false;
    for (size_t i = 0; i < node.num_inputs(); ++i) {
      for (const Value* v : tensors_of(node.input(i))) {
        if (is_renewed(v, node)) return true;
      }
    }
    return false;
  }

  bool is_renewed(const Value* v, const Node& by) const {
    const Node* maker = v->producer();
    if (!read_.count(v) || !maker->result_aliases_input() || !flow_.may_require_grad(v)) return false;
    auto found = writes_.find(aliases_.memory(v));
    if (found == writes_.end()) return false;
    // The writes before `by` are still there: the walk has not come to them.
    const auto& all = found->second;
    auto next = std::upper_bound(all.begin(), all.end(), positions_.at(maker));
    return next != all.end() && *next < positions_.at(&by);
  }

  // The result of a write is the tensor that was written.
  const Value* same(const Value* v) const {
    auto it = same_.find(v);
    return it == same_.end() ? v : it->second;
  }

  // Returns the start of a row of operators that may return their input (dropout of nothing, reshape).
  const Value* first(const Value* v) const {
    auto it = first_.find(same(v));
    return it == first_.end() ? same(v) : it->second;
  }

  // Returns the tensors that the value may be. In between, of a longer row, none is looked at.
  std::array<const Value*, 2> tensors_of(const Value* v) const { return {same(v), first(v)}; }

  Graph& graph_;
  Aliases aliases_;
  GradientFlow flow_;
  DeadCodeOptions options_;
  std::unordered_set<Aliases::Memory> seen_;  // memory that a later live node reads
  std::unordered_set<const Value*> read_;     // values that one reads
  std::unordered_map<const Value*, const Value*> same_, first_;
  std::unordered_map<const Node*, size_t> positions_;
  std::unordered_map<Aliases::Memory, std::vector<size_t>> writes_;  // positions, ascending
};

const RegisterPass dead_code_pass({
    "dead_code",
    "Erases nodes and writes that no output, input, parameter or buffer can show.",
    {{"remove_random", "false", "also erase random draws nobody uses (later draws then give other numbers)"}},
    [](GraphModule& module, const PassOptions& options, std::vector<std::string>* report) {
      const size_t before = module.graph().size();
      const bool changed = dead_code(module, {flag_option(options, "remove_random", false)});
      if (report && changed) report->push_back("erased " + std::to_string(before - module.graph().size()) + " nodes");
      return changed;
    },
});

}  // namespace

bool dead_code(Graph& graph, const State* state, const DeadCodeOptions& options) {
  bool changed = false;
  // A removed node may have been the reason why another value carries a gradient: repeat until nothing is removed.
  while (Sweep(graph, state, options).run()) changed = true;
  return changed;
}

bool dead_code(GraphModule& module, const DeadCodeOptions& options) {
  return dead_code(module.graph(), &module.state(), options);
}

}  // namespace plumb
