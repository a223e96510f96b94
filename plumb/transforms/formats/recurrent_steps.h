// A recurrent operator as what it is made of: linear layers and pointwise operators, step by step.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

// Returns why it cannot be taken apart; nullopt if it can. For nodes of which is_recurrent() is true.
std::optional<std::string> steps_obstacle(const Node* node, const State& state);

// Replaces the node (a cell, or any number of layers and directions with dropout between them and projected states) by
// aten::linear and pointwise nodes, in torch's order of operations. The inputs of all steps go through one linear
// layer. Returns the linear nodes.
std::vector<Node*> take_apart(GraphModule& module, Node* node);

// Returns the layers that draw for dropout between them and can be taken apart. As one operator they draw by
// themselves, otherwise than taken apart.
std::vector<Node*> random_recurrent_layers(GraphModule& module);

}  // namespace plumb
