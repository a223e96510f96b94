#include "plumb/transforms/rewrite.h"

#include <span>

#include "plumb/core/join.h"

namespace plumb {

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

std::string other_names(const std::vector<std::string>& names) {
  return names.size() < 2 ? "" : "also named " + join(std::span(names).subspan(1));
}

}  // namespace plumb
