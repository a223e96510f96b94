// Shared by the transforms: steps of a rewrite, and facts about the operands of nodes: parameters seen through views,
// types, gradients. Not for other rooms.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plumb/graph/aliases.h"
#include "plumb/graph/graph.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/state.h"

namespace plumb {

// Inserts a call before `before` on behalf of `node`, whose module, source and grad mode it has. Its result is
// described as `like`.
Node* insert_call(Graph& graph, Node* before, std::string_view op, std::vector<Arg> args, const Node* node,
                  const Value* like);

// Returns whether a call's result has the type, the device and the strides of its first input.
bool keeps_type(const Node* node);

// Erases calls that return their first input itself: a cast to the type and device that it has, as norms of libraries
// have one. What reads their results reads that input: one tensor is one value again. Returns whether there were any.
bool erase_identities(Graph& graph);

// Returns for each node the number of writes before it: nothing is written between two nodes of one number.
std::unordered_map<const Node*, size_t> count_writes(const Graph& graph);

// For reports: "also named b, c" of one tensor's names a, b, c; "" if it has just one.
std::string other_names(const std::vector<std::string>& names);

// True if the node returns its first input rearranged, copied, cast, rounded or measured, and computes nothing with it:
// views, `to`, plumb::simulate_format.
bool is_passthrough(const Node* node);

// Returns a constant number; nothing for anything else.
std::optional<double> number_of(const Arg& arg);

// The get_attr node that this value comes from through pass-through nodes; null if something is computed on the way.
const Node* source_attribute(const Value* value);
// Returns the parameter that it is then; null if it is none.
const Attr* source_parameter(const Value* value, const State& state);

// Returns what a value is, before nodes that pass it through.
const Value* before_passthrough(const Value* value);

// Returns the uses of a value by nodes that compute, seen through pass-through nodes.
std::vector<Use> effective_uses(const Value* value);

// Returns the first of the patterns (core/text.h) that fits the node's module's path, a parameter that it takes, or, if
// it fits no product of the graph by these, the name of the node's result; null if none does. "%NAME" fits names of
// results alone.
const std::string* excluded_by(const Node* node, const std::vector<std::string>& patterns);

// Returns the dtype of a value from its meta or the state; nullopt if it is not known without running.
std::optional<at::ScalarType> dtype_of(const Value* value, const State& state);
// Returns the sizes of a value from its meta or the state; empty if they are not known, and of null.
std::vector<int64_t> sizes_of(const Value* value, const State& state);
// Returns false only if the dtype is known and is no floating-point one.
bool may_be_float(const Value* value, const State& state);
// Returns false only if the dtype is known and is neither floating-point nor complex.
bool may_have_gradient(const Value* value, const State& state);

// Returns nodes that a gradient can flow through: with a floating or complex input or a parameter among their
// ancestors, and no node between of which `stops` holds.
NodeSet differentiable_nodes(const Graph& graph, const State& state, bool (*stops)(const Node&) = is_detach);

// Returns nodes that depend on parameters or floating-point buffers (perhaps on constants too) but on no input, with
// the name of one such tensor: a weight made by spectral_norm or another parametrization.
std::unordered_map<const Node*, std::string> computed_from_parameters(const Graph& graph, const State& state);

// True if the value holds huge negative numbers, that is, if it is an additive attention mask. Decided from how it is
// made, or from its values if it is a constant.
bool looks_like_mask(const Value* value, const State& state);

}  // namespace plumb
