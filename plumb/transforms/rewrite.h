// Steps of a rewrite that transforms share. Not for other rooms.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

// Inserts a call before `before` on behalf of `node`, whose module, source and grad mode it has. Its result is
// described as `like`.
Node* insert_call(Graph& graph, Node* before, std::string_view op, std::vector<Arg> args, const Node* node,
                  const Value* like);

// Moves all uses of `node` to `made`, and with them the name of its result if it has just one; erases `node`.
void replace_and_name(Graph& graph, Node* node, Node* made);

// Erases calls that return their first input itself: a cast to the type and device that it has, as norms of libraries
// have one. What reads their results reads that input: one tensor is one value again. Returns whether there were any.
bool erase_identities(Graph& graph);

// For reports: "also named b, c" of one tensor's names a, b, c; "" if it has just one.
std::string other_names(const std::vector<std::string>& names);

}  // namespace plumb
