#include "plumb/transforms/scale/inverses.h"

#include <algorithm>

#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/scale_adds.h"

namespace plumb {
namespace {

bool inverts(const Node* node) {
  return node->is_op("aten::linalg_solve_triangular") || node->is_op("aten::linalg_inv") ||
         node->is_op("aten::linalg_solve") || node->is_op("aten::inverse") || node->is_op("aten::triangular_solve");
}

}  // namespace

const char* part_of_inverse(const Node* add) {
  const auto inputs = add->inputs();
  if (std::ranges::any_of(inputs, [](const Value* v) { return before_passthrough(v)->producer()->is_op("aten::eye"); }))
    return "it adds the identity matrix";
  // row + (row * rows_before).sum(), written where the row was
  const bool sums = std::ranges::any_of(inputs, [&](const Value* operand) {
    const Node* sum = before_passthrough(operand)->producer();
    if (!sum->is_op("aten::sum")) return false;
    const Node* product = before_passthrough(sum->input(0))->producer();
    return product->is_op("aten::mul") && product->num_inputs() == 2;
  });
  const bool writes = std::ranges::any_of(add->result()->uses(), [](const Use& use) {
    return use.user->is_op("aten::slice_scatter") || use.user->is_op("aten::select_scatter");
  });
  return sums && writes ? "it is a step of a forward substitution" : nullptr;
}

NodeSet computed_with_inverse(const Graph& graph, const State& state) {
  const auto is_parameter = [&](const Value* value) { return source_parameter(value, state) != nullptr; };
  NodeSet found;
  for (const Node* node : graph.nodes()) {
    const auto inputs = node->inputs();
    const bool inverse = inverts(node) || (is_add(node) && part_of_inverse(node));
    const bool depends = std::ranges::any_of(inputs, [&](const Value* v) { return found.contains(v->producer()); }) &&
                         std::ranges::none_of(inputs, is_parameter);
    if (inverse || depends) found.insert(node);
  }
  return found;
}

}  // namespace plumb
