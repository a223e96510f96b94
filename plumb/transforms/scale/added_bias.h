// A bias that a forward adds by hand: `x * weight + bias`, `linear(x) + bias` behind something else.
#pragma once

#include "plumb/graph/graph_module.h"
#include "plumb/transforms/report.h"

namespace plumb {

// Returns whether an operand of the add is a bias: a parameter, behind views, with a value for each feature alone (all
// sizes but one are 1). It begins at zero and is no stream of unit scale, so that the add stays as it is; the bias's
// gradient, a sum over what it is expanded to, gets the factor of a layer's bias.
bool scale_added_bias(GraphModule& module, Node* add, Report& report);

}  // namespace plumb
