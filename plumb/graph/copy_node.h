// Copies nodes from one graph into another.
#pragma once

#include <functional>

#include "plumb/graph/graph.h"

namespace plumb {

using ArgOf = std::function<Arg(Value*)>;

// Returns the argument with every value replaced by what `map` returns for it.
Arg map_arg(const Arg& arg, const ArgOf& map);

// Returns a copy of an operator call or get_attr at `into`'s insertion point, with types and metadata.
// Results keep their names where those are free.
Node* copy_node(Graph& into, const Node& node, const ArgOf& map);

// Lets all users of a value take the argument in its place, which may be a constant.
void replace_uses(Graph& graph, const Value* gone, const Arg& with);

}  // namespace plumb
