#include "plumb/graph/mode.h"

namespace plumb {
namespace {

// Returns null if the operator has no such argument, or takes it from the graph.
const c10::IValue* constant_of(const Node* node, std::string_view argument) {
  const Arg* arg = node->is_call() ? node->try_arg(argument) : nullptr;
  return arg && arg->is_constant() ? &arg->constant() : nullptr;
}

const c10::IValue* mode_of(const Node* node) {
  for (std::string_view argument : {"train", "training"}) {
    if (const c10::IValue* mode = constant_of(node, argument)) return mode;
  }
  return nullptr;
}

template <class Holds>
bool any_node(const Graph& graph, const Holds& holds) {
  for (const Node* node : graph.nodes()) {
    if (holds(node)) return true;
  }
  return false;
}

bool depends_on_mode(const Node* node, bool made_in_training) {
  if (mode_of(node)) return true;
  const c10::IValue* attention = constant_of(node, "dropout_p");
  return attention && (!made_in_training || (attention->isDouble() && attention->toDouble() != 0));
}

}  // namespace

bool made_in_training(const Graph& graph) {
  bool anything = false;
  const bool training = any_node(graph, [&](const Node* node) {
    const c10::IValue* mode = mode_of(node);
    anything = anything || mode;
    // native_dropout's mode is optional: none means training.
    return mode && (!mode->isBool() || mode->toBool());
  });
  return training || !anything;
}

bool depends_on_mode(const Graph& graph, bool made_in_training) {
  return any_node(graph, [&](const Node* node) { return depends_on_mode(node, made_in_training); });
}

}  // namespace plumb
