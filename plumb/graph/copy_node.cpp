#include "plumb/graph/copy_node.h"

namespace plumb {

Arg map_arg(const Arg& arg, const ArgOf& map) {
  if (arg.is_value()) return map(arg.value());
  if (!arg.is_list()) return arg;
  // Schemas nest lists two deep at most.
  Arg::List elements;
  elements.reserve(arg.list().size());
  for (const Arg& e : arg.list()) elements.push_back(map_arg(e, map));
  return elements;
}

Node* copy_node(Graph& into, const Node& node, const ArgOf& map) {
  Node* twin = nullptr;
  if (node.kind() == NodeKind::GetAttr) {
    twin = into.get_attr(node.target());
  } else {
    std::vector<Arg> args;
    args.reserve(node.args().size());
    for (const Arg& arg : node.args()) args.push_back(map_arg(arg, map));
    std::vector<int32_t> lists;
    for (int32_t count : node.result_layout()) {
      if (count >= 0) lists.push_back(count);
    }
    twin = into.call(node.op(), std::move(args), std::move(lists));
  }
  for (size_t i = 0; i < node.num_results(); ++i) {
    const Value* from = node.result(i);
    Value* to = twin->result(i);
    if (to->type() != from->type()) to->set_type(from->type());
    if (from->meta()) to->set_meta(from->meta());
    if (!into.find_value(from->name())) to->rename(from->name());
  }
  twin->meta() = node.meta();
  return twin;
}

void replace_uses(Graph& graph, const Value* gone, const Arg& result) {
  const ArgOf map = [&](Value* v) { return v == gone ? result : Arg(v); };
  for (Node* user : gone->users()) {
    if (user->kind() == NodeKind::Output) {
      std::vector<Arg> outputs;
      for (const Arg& out : user->args()) outputs.push_back(map_arg(out, map));
      graph.output(std::move(outputs));
      continue;
    }
    for (size_t a = 0; a < user->args().size(); ++a) user->set_arg(a, map_arg(user->arg(a), map));
  }
}

}  // namespace plumb
