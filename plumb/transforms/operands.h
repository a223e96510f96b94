// What is behind a node's operands: parameters seen through views, types, gradients.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"

namespace plumb {

// Hands one input on, rearranged, copied, cast, rounded or measured, but not computed with: views, `to`,
// plumb::simulate_format.
bool is_passthrough(const Node* node);

// The get_attr node that this value comes from over nodes that hand it on; null if something is computed on the way.
const Node* source_attribute(const Value* value);

// Where a value goes over nodes that hand it on: the uses by nodes that compute.
std::vector<Use> effective_uses(const Value* value);

// What is known without running: the type of a value, from its meta or the state; nothing if it is not known.
std::optional<at::ScalarType> dtype_of(const Value* value, const State& state);
// False only where the type is known and is no floating one.
bool may_be_float(const Value* value, const State& state);

// Nodes that a gradient can flow through: with a floating input or a parameter among their ancestors.
std::unordered_set<const Node*> differentiable_nodes(const Graph& graph, const State& state);

// Nodes that compute from parameters, perhaps with buffers and constants, but from no input: a weight made by
// spectral_norm or another parametrization.
std::unordered_map<const Node*, std::string> computed_from_parameters(const Graph& graph, const State& state);

// The value blocks by huge negative numbers: it is an attention mask, seen by how it is made or by its constant.
bool looks_like_mask(const Value* value, const State& state);

}  // namespace plumb
