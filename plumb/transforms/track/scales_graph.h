// The graph of a tracked module as a picture: what flows where, with the scale of every tensor and gradient. It is no
// program: nodes can be pruned from it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

// One value of the graph (an operator with several results is several nodes), or the output.
struct ScaleNode {
  std::string name;  // the value's; "output" for the output
  NodeKind kind = NodeKind::CallFunction;
  std::string target;  // "aten::linear", a parameter's full name, an input's name
  size_t result_index = 0;
  std::vector<size_t> inputs;  // earlier nodes, in argument order, repeated if used twice
  std::vector<size_t> places;  // positions before pruning that the inputs stand for, one each; empty: not pruned
  std::string module;          // path
  std::string source;          // "model.py:12"
  std::optional<TensorMeta> meta;
  bool is_float_tensor = false;
  bool is_parameter = false;   // trained or frozen
  bool requires_grad = false;  // a parameter that is trained
  std::optional<Metrics> metrics;
};

class ScalesGraph {
 public:
  std::vector<ScaleNode> nodes;  // in graph order

  const ScaleNode* find(std::string_view name) const;  // null if there is none
  // Returns a table for people: name, target, inputs, and std, abs_max of value and gradient.
  std::string to_text() const;
  // {"nodes": [{"name", "kind", "target", "inputs": [names], "module", "source", "sizes", "dtype", "fwd": {...}, "bwd":
  // {...}}]} NaN and infinities are null.
  std::string to_json() const;
};

// Each function returns a copy without some nodes, whose users are connected to the nodes' inputs. Linear time.

// Removes what is no floating-point tensor. Users take its only floating-point input, if it has just one.
ScalesGraph prune_non_float_tensors(const ScalesGraph& graph);

// Removes nodes with exactly one floating-point input whose scale (mean absolute value) is the same, forward and
// backward, within rtol: reshapes and the like. Users take that input. Nodes that were not measured stay, so that of a
// graph that has not run nothing goes.
ScalesGraph prune_same_scale_tensors(const ScalesGraph& graph, double rtol = 0x1p-16);

// Removes nodes by operator ("aten::add" stands for every overload), parameter name or input name, or as `selected`
// says. Users take its inputs. Throws Error(InvalidArgument) for an empty function.
ScalesGraph prune_selected_nodes(const ScalesGraph& graph, const std::vector<std::string>& targets);
ScalesGraph prune_selected_nodes(const ScalesGraph& graph, const std::function<bool(const ScaleNode&)>& selected);

}  // namespace plumb
