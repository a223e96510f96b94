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

NodeSet nodes_of_exponents(const Graph& graph, const NodeSet& differentiable) {
  using Names = std::set<std::string_view>;
  static const Names powers = {"aten::exp",       "aten::exp2",         "aten::expm1",
                               "aten::logsumexp", "aten::logcumsumexp", "aten::logaddexp"},
                     logarithms = {"aten::log",         "aten::log2",      "aten::log10",         "aten::log1p",
                                   "aten::log_softmax", "aten::logsumexp", "aten::logaddexp",     "aten::logcumsumexp",
                                   "aten::slogdet",     "aten::logdet",    "aten::linalg_slogdet"},
                     sums = {"aten::add",   "aten::sub",     "aten::rsub",    "aten::neg",        "aten::cumsum",
                             "aten::where", "aten::maximum", "aten::minimum", "aten::masked_fill"},
                     choices = {"aten::sum", "aten::mean", "aten::index", "aten::gather", "aten::index_select"};
  // A multiple by what has no gradient, a mask say, is an exponent as it is itself.
  const auto is_multiple = [&](const Node* node) {
    if (!node->is_op("aten::mul") && !node->is_op("aten::div")) return false;
    return std::ranges::count_if(node->inputs(),
                                 [&](const Value* v) { return differentiable.contains(v->producer()); }) < 2;
  };
  const auto is_term = [&](const Node* node) {
    return node->is_call() && (sums.contains(node->op_name()) || is_passthrough(node) || is_multiple(node));
  };
  NodeSet found, logs;
  for (const Node* node : graph.nodes()) {
    if (!node->is_call() || !differentiable.contains(node)) continue;
    const bool sums_logs =
        (is_term(node) || choices.contains(node->op_name())) &&
        std::ranges::any_of(node->inputs(), [&](const Value* v) { return logs.contains(v->producer()); });
    if (logarithms.contains(node->op_name()) || sums_logs) logs.insert(node);
  }
  const auto reads_a_term = [&](const Node* user) {
    return user->is_call() &&
           (powers.contains(user->op_name()) || (is_term(user) && (found.contains(user) || logs.contains(user))));
  };
  for (const Node* node = graph.last(); node; node = node->prev()) {
    bool some = false, all = true;
    for (const Value* result : node->results()) {
      for (const Use& use : result->uses()) {
        if (use.user->kind() == NodeKind::Output || looks_at_shape_only(*use.user)) continue;
        const bool term = reads_a_term(use.user);
        some |= term, all &= term;
      }
    }
    if (some && all) found.insert(node);
  }
  return found;
}

}  // namespace plumb
