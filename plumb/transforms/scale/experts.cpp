#include "plumb/transforms/scale/experts.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

std::string_view operand(const Node* node, size_t i) { return node->facts().contraction.operands[i].argument; }

}  // namespace

std::optional<std::string> experts_obstacle(const Node* node, const State& state) {
  const Arg &rows = node->arg(operand(node, 0)), &matrices = node->arg(operand(node, 1));
  if (!rows.is_value() || !matrices.is_value()) return "an operand is a constant";
  if (matrices.value()->producer()->is_op("plumb::scale_bwd")) return "its matrices have factors already";
  const auto sizes = sizes_of(rows.value(), state), all = sizes_of(matrices.value(), state);
  if (sizes.empty() || all.empty()) return "the sizes of its operands are not known";
  if (sizes.size() != 2 || all.size() != 3 || !node->arg(node->facts().groups).is_value())
    return "it does not multiply groups of rows by a matrix each";
  for (const char* more : {"bias", "out_dtype"}) {
    if (const Arg* arg = node->try_arg(more); arg && !arg->is_none()) return std::string("it has ") + more;
  }
  return std::nullopt;
}

double scale_experts(GraphModule& module, Node* node) {
  Graph& graph = module.graph();
  const std::string_view name = operand(node, 1);
  Value* matrices = node->arg(name).value();
  const auto all = sizes_of(matrices, module.state());
  const auto at_least_one = [](int64_t size) { return static_cast<double>(std::max<int64_t>(size, 1)); };
  const double groups = at_least_one(all[0]), in = at_least_one(all[1]), out = at_least_one(all[2]);
  const double rows =
      std::max(at_least_one(sizes_of(node->arg(operand(node, 0)).value(), module.state())[0]) / groups, 1.0);
  const double scale = 1 / std::sqrt(in);
  node->set_arg(name,
                insert_call(graph, node, "plumb::scale_bwd", {matrices, 1 / (scale * std::sqrt(rows))}, node, matrices)
                    ->result());
  Value* product = node->result();
  Node* scaled = insert_call(graph, node->next(), "plumb::rescale", {product, scale, scale}, node, product);
  graph.replace_all_uses_with(product, scaled->result(), scaled);
  return scale * std::sqrt(out);
}

}  // namespace plumb
