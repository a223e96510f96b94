// Finds a graph's residual adds: one operand is an ancestor of the other.
#pragma once

#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

struct ResidualAdd {
  Node* add = nullptr;
  Value* skip = nullptr;      // the ancestor
  Value* residual = nullptr;  // what is computed from it
  // A node that `is_attention` holds for lies on the branch, and not on that of a residual add on the branch, whose sum
  // has a stream of its own: it depends on the skip, and the residual depends on it.
  bool attention = false;
  // The residual add of the same skip whose branch directly contains this one; -1 if there is none.
  int parent = -1;
};

struct ResidualAnalysis {
  std::vector<ResidualAdd> adds;  // in graph order
  // For each skip: a node on a branch that starts at it -> the add of the innermost such branch (an index into adds).
  // The add itself, which uses the skip too, is not on its own branch.
  std::unordered_map<const Value*, std::unordered_map<const Node*, int>> branch_of;
  // Nodes inside some residual branch, with other paths around them.
  std::unordered_set<const Node*> inside;
};

// candidates: adds, whose first two inputs are their operands, in graph order.
// A value depends on another if there is a path of uses between them; operators that look only at a tensor's shape
// (zeros_like and the like) pass nothing on. Time O(E (log N + D / 32)) for E uses and N nodes, where D is how many
// add-and-operand spans lie over one place of the graph on average: the nesting, not the depth. See the .cpp.
ResidualAnalysis find_residual_adds(const Graph& graph, const std::vector<Node*>& candidates,
                                    const std::function<bool(const Node*)>& is_attention);

// Returns taus of residual branches in order, for TauRule::Depth: attention[i] says whether branch i has attention.
std::vector<double> depth_taus(const std::vector<bool>& attention, double residual_mult = 1.0,
                               double residual_attn_ratio = 1.0);

}  // namespace plumb
