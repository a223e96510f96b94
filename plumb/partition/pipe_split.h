// The mark between two pipeline stages: an operator without arguments and results that does nothing when it runs.
#pragma once

#include "plumb/graph/graph.h"

namespace plumb {

// Call it in a module's forward, between the operators of two stages; capture keeps it as a node `plumb::pipe_split()`.
void pipe_split();

// True for `plumb::pipe_split` and torch's own mark, `pippy::_pipe_split`.
bool is_pipe_split(const Node& node);

}  // namespace plumb
