#include "plumb/transforms/rewrite.h"

#include <span>

#include "plumb/core/join.h"

namespace plumb {
namespace {

bool is_identity(const Node* node) {
  if (!node->is_op("aten::to") && !node->is_op("aten::type_as")) return false;
  auto is_off = [&](std::string_view name) {
    const Arg* arg = node->try_arg(name);
    return !arg || arg->is_none() || (arg->is_constant() && arg->constant().isBool() && !arg->constant().toBool());
  };
  if (!is_off("copy") || !is_off("memory_format")) return false;
  const auto before = node->input(0)->meta(), after = node->result()->meta();
  return before && after && before->dtype == after->dtype && before->device == after->device &&
         before->strides == after->strides;
}

}  // namespace

Node* insert_call(Graph& graph, Node* before, std::string_view op, std::vector<Arg> args, const Node* node,
                  const Value* like) {
  auto here = graph.inserting_before(before);
  Node* made = graph.call(op, std::move(args));
  made->meta() = node->meta();
  made->result()->set_meta(like->meta());
  return made;
}

void replace_and_name(Graph& graph, Node* node, Node* made) {
  const std::string name = node->num_results() == 1 ? node->result()->name() : "";
  graph.replace_node(node, made);
  if (!name.empty()) made->result()->rename(name);
}

bool erase_identities(Graph& graph) {
  bool changed = false;
  for (Node* node : graph.nodes()) {
    if (!is_identity(node)) continue;
    graph.replace_all_uses_with(node->result(), node->input(0));
    graph.erase(node);
    changed = true;
  }
  return changed;
}

std::string other_names(const std::vector<std::string>& names) {
  return names.size() < 2 ? "" : "also named " + join(std::span(names).subspan(1));
}

}  // namespace plumb
