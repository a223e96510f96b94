#include "plumb/graph/passes/layouts.h"

#include <algorithm>
#include <unordered_set>

#include "plumb/graph/aliases.h"
#include "plumb/graph/node_set.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

std::string_view base_name(const Node* node) {
  const std::string_view name = node->op_name();
  return name.substr(name.rfind(':') + 1);
}

bool is_origin(const Node* node) {
  const std::string_view name = base_name(node);
  return name == "residual_add" || name == "rms_norm" || name == "layer_norm" || name == "softmax" ||
         name == "scaled_dot_product_attention";
}

bool makes_other_layout(const Node* node) {
  if (!is_origin(node)) return false;
  if (base_name(node) == "scaled_dot_product_attention") return true;
  const auto inputs = node->inputs();
  return std::any_of(inputs.begin(), inputs.end(), [](const Value* value) {
    const auto& meta = value->meta();
    return value->is_tensor() && (!meta || !meta->is_contiguous());
  });
}

// Its result is in rows, whatever its inputs are.
bool makes_rows(const Node* node) {
  const std::string_view name = base_name(node);
  return name == "linear" || name == "matmul" || name == "mm" || name == "bmm" || name == "addmm" ||
         name == "embedding" || node->target() == "aten::contiguous";
}

bool reads_strides(const Node* node) {
  return node->is_op("aten::view") || node->is_op("aten::as_strided") || node->is_op("aten::view_as_complex");
}

// Inserts what lays the node's first input out as its type says, and copies nothing where it is already.
bool restore_layout(Graph& graph, Node* node) {
  Value* value = node->input(0);
  const auto order = value->meta() ? memory_order(*value->meta()) : std::nullopt;
  if (!order) return false;
  auto here = graph.inserting_before(node);
  auto call = [&](const char* op, std::vector<Arg> args) {
    Node* made = graph.call(op, std::move(args));
    made->meta() = node->meta();
    return made->result();
  };
  std::vector<int64_t> back(order->size());
  for (size_t i = 0; i < order->size(); ++i) back[static_cast<size_t>((*order)[i])] = static_cast<int64_t>(i);
  const bool rows = std::is_sorted(order->begin(), order->end());
  Value* made = rows ? value : call("aten::permute", {value, c10::IValue(*order)});
  made = call("aten::contiguous", {made});
  if (!rows) made = call("aten::permute", {made, c10::IValue(back)});
  made->set_meta(value->meta());
  node->set_input(0, made);
  return true;
}

}  // namespace

bool keep_views_working(Graph& graph) {
  std::unordered_set<const Value*> moved;
  std::vector<Node*> readers;
  for (Node* node : graph.nodes()) {
    if (!node->is_call()) continue;
    const auto inputs = node->inputs();
    const bool behind = std::any_of(inputs.begin(), inputs.end(), [&](const Value* v) { return moved.count(v); });
    if (behind && reads_strides(node) && moved.count(node->input(0))) readers.push_back(node);
    if (makes_other_layout(node) || (behind && !makes_rows(node))) {
      for (const Value* result : node->results()) moved.insert(result);
    }
  }
  if (readers.empty()) return false;
  const Aliases aliases(graph);
  NodeSet written;
  for (const Node* node : readers) {
    if (aliases.is_written(aliases.memory(node->input(0)))) written.insert(node);
  }
  bool changed = false;
  for (Node* node : readers) {
    if (node->target() != "aten::view" || written.contains(node)) {
      changed |= restore_layout(graph, node);
      continue;
    }
    Node* made;
    {
      auto here = graph.inserting_before(node);
      made = graph.call("aten::reshape", {node->args()[0], node->args()[1]});
    }
    graph.replace_node(node, made);
    changed = true;
  }
  return changed;
}

}  // namespace plumb
