// Unit scaling of lstm, gru and rnn operators and of their cells. The operator stays one call; its weights, states and
// outputs get the factors of plumb/scaling/rules_recurrent.h:
//
//   weights       values by sqrt((1 - share) / in) and sqrt(share / hidden), the latter over the states' scale; their
//                 gradients and the biases' get factors of their own
//   given states  times the states' scale, outputs and final states over it, both with their gradients
//
// so inputs, weights and states from outside have unit scale, and the output has it, too. The gradient of the input is
// that of this function (constraint to_output_scale); scale_recurrent() returns its scale.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "plumb/graph/graph_module.h"

namespace plumb {

// Returns true for "aten::lstm", "aten::gru_cell" and so on.
bool is_recurrent(const Node* node);

// Returns whether a node is a single step: "aten::lstm_cell" and so on.
bool is_recurrent_cell(const Node* node);
// Returns whether a boolean argument is the constant true.
bool is_set(const Node* node, std::string_view argument);

// The role of an argument of a recurrent operator.
enum class RecurrentRole { Weight, Bias, Other };
RecurrentRole recurrent_role(const Node* node, const Value* value);

// Returns why nothing can be done with a recurrent node: states or weights that are no values of the graph, flags that
// are computed, other weights than its layers have. nullopt for what torch would run. Graphs of files can hold
// anything.
std::optional<std::string> operand_obstacle(const Node* node);

// Returns why its weights cannot be scaled; nullopt if they can. Sizes come from the values, or for parameters from the
// state.
std::optional<std::string> recurrent_obstacle(const Node* node, const State& state);

// Puts the factors around the node. `steps` counts for a cell, which sees one of them. Returns the scale of the
// gradient at the input, for unit-normal gradients at the output.
double scale_recurrent(GraphModule& module, Node* node, int64_t steps);

}  // namespace plumb
