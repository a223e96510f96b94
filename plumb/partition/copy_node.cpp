#include "plumb/partition/copy_node.h"

namespace plumb::detail {

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
    if (node.kind() == NodeKind::CallModule) {
      twin = into.call_module(node.target(), std::make_shared<Graph>(node.subgraph()->clone()), std::move(args),
                              node.num_results());
    } else {
      std::vector<int32_t> lists;
      for (int32_t count : node.result_layout()) {
        if (count >= 0) lists.push_back(count);
      }
      twin = into.call(node.op(), std::move(args), std::move(lists));
    }
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

void inline_nested(Graph& graph) {
  for (Node* call = graph.first(); call;) {
    if (call->kind() != NodeKind::CallModule) {
      call = call->next();
      continue;
    }
    const Graph& inner = *call->subgraph();
    std::unordered_map<const Value*, Arg> known;
    size_t next = 0;
    for (const Node* in : inner.placeholders()) known.emplace(in->result(), call->arg(next++));
    auto map = [&](Value* v) { return known.at(v); };
    Node* first = nullptr;
    {
      auto here = graph.inserting_before(call);
      for (const Node* node : inner.nodes()) {
        if (node->kind() == NodeKind::Placeholder || node->kind() == NodeKind::Output) continue;
        Node* twin = copy_node(graph, *node, map);
        if (!call->meta().grad_enabled) twin->meta().grad_enabled = false;
        for (size_t i = 0; i < node->num_results(); ++i) known.emplace(node->result(i), twin->result(i));
        if (!first) first = twin;
      }
    }
    for (size_t i = 0; i < call->num_results(); ++i) {
      const Arg result = map_arg(inner.output_node()->arg(i), map);
      for (Node* user : call->result(i)->users()) {
        if (user->kind() == NodeKind::Output) {
          std::vector<Arg> outputs(user->args().begin(), user->args().end());
          for (Arg& out : outputs) {
            if (out.value() == call->result(i)) out = result;
          }
          graph.output(std::move(outputs));
          continue;
        }
        for (size_t a = 0; a < user->args().size(); ++a) {
          const Value* gone = call->result(i);
          user->set_arg(a, map_arg(user->arg(a), [&](Value* v) { return v == gone ? result : Arg(v); }));
        }
      }
    }
    Node* after = first ? first : call->next();  // nested calls of nested calls come next
    graph.erase(call);
    call = after;
  }
}

}  // namespace plumb::detail
