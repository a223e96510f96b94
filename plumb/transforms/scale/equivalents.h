// The table of unit-scaled operators: which of torch's each replaces, and what the way back must know of it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/node_set.h"

namespace plumb {

// How fold() takes a unit-scaled operator's factors away, by what they follow from: factor_rules.cpp.
enum class ScaledBy { None, Factor, Elementwise, Gate, Softmax, Window, Linear, Matmul, Add, Attention, Relu, Loss };

struct Equivalent {
  std::string_view to;  // "plumb::linear"
  ScaledBy scaled_by = ScaledBy::None;
  std::vector<std::string_view> weights = {};  // arguments of the operator that may be weights
  std::string_view bias = "";                  // "" if there is none
  bool any_weight = false;                     // a matmul: an operand is a weight only if it is a parameter
  // The operator stays, with factors around it: recurrent.h, experts.h
  bool recurrent = false, experts = false;
};

// Returns the equivalent of one of torch's operators. Null if there is none.
const Equivalent* find_equivalent(const Node* node);

// Returns the entry of a node that is a unit-scaled operator already, its arguments' names its own. Null if it is none.
const Equivalent* find_unit_scaled(const Node* node);

// Returns the sizes of an argument, where it is a tensor whose sizes are known.
std::optional<std::vector<int64_t>> sizes_of_argument(const Node* node, std::string_view name);

// Returns why this call cannot be replaced although its operator can; nullopt if it can. `differentiable`: the nodes
// that a gradient can flow through.
std::optional<std::string> why_not(const Node* node, const NodeSet& differentiable);

// Inserts the equivalent before the node, with its arguments; the caller replaces the node's uses.
Node* build_equivalent(Graph& graph, const Node* node, const Equivalent& equivalent);

// Returns the node's arguments for `op`: by name where both know it, else by position, else the default.
std::vector<Arg> arguments_for(const c10::OperatorHandle& op, const Node* node);

// Inserts a call of `to` with the node's arguments in the same order. Throws if `to` cannot take them.
Node* build_same_arguments(Graph& graph, const Node* node, std::string_view to);

}  // namespace plumb
