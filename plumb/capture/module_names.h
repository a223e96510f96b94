// The modules of a graph's nodes if the front end does not know them: a C++ module has no hooks around its forward.
#pragma once

#include <map>
#include <string>

#include "plumb/graph/graph.h"

namespace plumb {

// Class names by path, "" for the root: what named_modules() says.
using ModuleTypes = std::map<std::string, std::string>;

// Gives every call without a module one, by the parameters and buffers that are read. A node that reads one, itself or
// through a value made of such alone, is of the module that has it. Any other node is of the innermost module around
// the ones before and behind it, or around those whose results it reads, if that is farther in. So a call of a module
// without parameters counts to the module around it.
void name_modules_by_state(Graph& graph, const ModuleTypes& types);

}  // namespace plumb
