#include "plumb/transforms/scale/choices.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "plumb/graph/aliases.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/equivalents.h"

namespace plumb {
namespace {

// Returns whether an operator's factor belongs to a weight, which other graphs of the module have too.
bool takes_a_weight(const Node* node) {
  const Equivalent* equivalent = find_equivalent(node);
  if (!equivalent || equivalent->weights.empty()) return equivalent && equivalent->recurrent;
  return !equivalent->any_weight || std::ranges::any_of(node->inputs(), source_attribute);
}

}  // namespace

NodeSet nodes_that_only_choose(const Graph& graph, const State& state, const NodeSet& differentiable) {
  NodeSet read, choosing;
  bool returns_values = false;
  for (const Node* node = graph.last(); node; node = node->prev()) {
    bool reads = !node->is_call() || node->num_results() == 0 || may_write(*node) || takes_a_weight(node);
    for (const Value* result : node->results()) {
      if (!may_have_gradient(result, state)) continue;
      for (const Use& use : result->uses()) {
        reads |= read.contains(use.user) && !looks_at_shape_only(*use.user);
        returns_values |= use.user->kind() == NodeKind::Output && differentiable.contains(node);
      }
    }
    (reads ? read : choosing).insert(node);
  }
  return returns_values ? choosing : NodeSet();
}

NodeSet nodes_of_exponents(const Graph& graph) {
  static const std::set<std::string_view> powers = {"aten::exp",       "aten::exp2",         "aten::expm1",
                                                    "aten::logsumexp", "aten::logcumsumexp", "aten::logaddexp"},
                                          terms = {"aten::add",     "aten::sub",     "aten::rsub",
                                                   "aten::neg",     "aten::cumsum",  "aten::where",
                                                   "aten::maximum", "aten::minimum", "aten::masked_fill"};
  NodeSet found;
  const auto reads_an_exponent = [&](const Node* user) {
    if (!user->is_call()) return false;
    const bool term = terms.count(user->op_name()) || is_passthrough(user);
    return powers.count(user->op_name()) || (term && found.contains(user));
  };
  for (const Node* node = graph.last(); node; node = node->prev()) {
    bool some = false, all = true;
    for (const Value* result : node->results()) {
      for (const Use& use : result->uses()) {
        if (use.user->kind() == NodeKind::Output || looks_at_shape_only(*use.user)) continue;
        const bool exponent = reads_an_exponent(use.user);
        some |= exponent, all &= exponent;
      }
    }
    if (some && all) found.insert(node);
  }
  return found;
}

}  // namespace plumb
