#include "plumb/graph/mode.h"

namespace plumb {
namespace {

// Null if the operator has no such argument, or takes it from the graph.
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

struct Said {
  bool anything = false, training = false;
};

void listen(const Graph& graph, Said& said) {
  for (const Node* node : graph.nodes()) {
    if (const c10::IValue* mode = mode_of(node)) {
      said.anything = true;
      // native_dropout's mode is optional: none means training.
      said.training = said.training || !mode->isBool() || mode->toBool();
    }
    if (node->subgraph()) listen(*node->subgraph(), said);
  }
}

bool depends_on_mode(const Node* node, bool made_in_training) {
  if (mode_of(node)) return true;
  const c10::IValue* attention = constant_of(node, "dropout_p");
  return attention && (!made_in_training || (attention->isDouble() && attention->toDouble() != 0));
}

}  // namespace

bool made_in_training(const Graph& graph) {
  Said said;
  listen(graph, said);
  return said.training || !said.anything;
}

bool depends_on_mode(const Graph& graph, bool made_in_training) {
  for (const Node* node : graph.nodes()) {
    if (depends_on_mode(node, made_in_training)) return true;
    if (node->subgraph() && depends_on_mode(*node->subgraph(), made_in_training)) return true;
  }
  return false;
}

}  // namespace plumb
