// Unit scaling of products whose groups of rows are each multiplied by a matrix of their own, as by the experts of a
// mixture. The operator stays one call, with factors around it, those of linear (Unit Scaling, arXiv 2303.11257, table
// A.2): 1 / sqrt(in) behind it and 1 / sqrt(rows of a group) at the gradient of the matrices. How the rows are divided
// is not known: each group is taken to have as many as the others.
#pragma once

#include <optional>
#include <string>

#include "plumb/graph/graph_module.h"

namespace plumb {

// Returns why the matrices of a grouped product cannot be scaled; nullopt if they can.
std::optional<std::string> experts_obstacle(const Node* node, const State& state);

// Puts the factors around the node. Returns the scale of the gradient at the rows, for unit-normal gradients at the
// output.
double scale_experts(GraphModule& module, Node* node);

}  // namespace plumb
