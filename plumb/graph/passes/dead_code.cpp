#include "plumb/graph/passes/dead_code.h"

#include <vector>

#include "plumb/graph/aliases.h"
#include "plumb/graph/passes/tools.h"

namespace plumb {
namespace {

bool must_stay(const Node& node, const DeadCodeOptions& options) {
  if (node.kind() == NodeKind::Placeholder || node.kind() == NodeKind::Output) return true;
  return has_hidden_effects(node) || (!options.remove_random && node.is_random());
}

// Reading a view whose memory was written since it was made lets eager make the view's history anew, there and then. If
// the view is read again, the order in which its gradients are summed depends on the first read, dead or not.
bool renews_history(const Node& node, const Aliases& aliases, const GradientFlow& flow) {
  if (!node.meta().grad_enabled) return false;
  for (size_t i = 0; i < node.num_inputs(); ++i) {
    const Value* v = node.input(i);
    if (v->uses().size() < 2 || !v->producer()->result_aliases_input() || !flow.may_require_grad(v)) continue;
    const Node* last = aliases.last_write(aliases.memory(v));
    if (last && v->producer()->is_before(last)) return true;
  }
  return false;
}

// One walk from the end: whether a node is live depends only on what comes after it.
bool erase_dead(Graph& graph, const State* state, const DeadCodeOptions& options) {
  const Aliases aliases(graph, state);
  const GradientFlow flow(graph, aliases, state);
  std::unordered_map<Aliases::Memory, bool> seen;  // memory that a later live node reads
  bool changed = false;
  for (Node* node = graph.last(); node;) {
    Node* previous = node->prev();
    bool live = must_stay(*node, options);
    for (size_t i = 0; i < node->num_results() && !live; ++i) live = node->result(i)->has_uses();
    for (Aliases::Memory m : aliases.written(node)) {
      if (live) break;
      live = aliases.is_external(m) || seen.count(m);
    }
    if (live || renews_history(*node, aliases, flow)) {
      for (Aliases::Memory m : aliases.read(node)) seen[m] = true;
    } else {
      graph.erase(node);
      changed = true;
    }
    node = previous;
  }
  return changed;
}

const RegisterPass registered({
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
  for (Graph* g : every_graph(graph)) changed = erase_dead(*g, state, options) || changed;
  return changed;
}

bool dead_code(GraphModule& module, const DeadCodeOptions& options) {
  return dead_code(module.graph(), &module.state(), options);
}

}  // namespace plumb
