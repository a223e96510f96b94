// Copies nodes from one graph into another.
#pragma once

#include <functional>

#include "plumb/graph/graph.h"

namespace plumb::detail {

using ArgOf = std::function<Arg(Value*)>;

// The argument with every value replaced.
Arg map_arg(const Arg& arg, const ArgOf& map);

// A copy of an operator call, get_attr or nested call at `into`'s insertion point; types and metadata too. Results keep
// their names where those are free.
Node* copy_node(Graph& into, const Node& node, const ArgOf& map);

// Puts the nodes of nested graphs in the place of the calls.
void inline_nested(Graph& graph);

}  // namespace plumb::detail
