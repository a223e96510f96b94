// The weights and biases of the operators that unit_scale replaces, and stage 5, which gives them unit variance.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "plumb/transforms/module.h"
#include "plumb/transforms/report.h"
#include "plumb/transforms/scale/equivalents.h"
#include "plumb/transforms/scale/parameter_scaling.h"

namespace plumb {

struct ParameterRoles {
  // A tensor under its first name; `names` are all of its names in the state.
  struct Entry {
    std::vector<std::string> names;
    std::vector<const Node*> operators;  // that use it so, before replacement
  };
  std::map<std::string, Entry> weights, biases;
  std::set<std::string> norms;
  // Parameters in other uses: name -> what uses it.
  std::map<std::string, std::string> others;
  // Operators that must not be replaced, because their weight is used by something else, too.
  std::unordered_map<const Node*, std::string> left_alone;

  // Notes that the operator was replaced by another node.
  void moved(const Node* from, const Node* to);
};

// Plans the parameters' roles. becomes: what the operator would be replaced by, null if it would not be. Where a tensor
// is an operator's weight and something else's operand, neither the tensor nor the operators it is a weight of may
// change; that can take the ground from other tensors, and so on.
ParameterRoles plan_parameters(const Graph& graph, const State& state,
                               const std::function<const Equivalent*(const Node*)>& becomes);

// Divides weights by their standard deviation, sets biases to zero. Without `live` the state gets new tensors; those it
// had, which others may share, stay as they are. With `live`, of the model whose tensors the state shares, its
// parameters are confirmed, written in place, or given back. True if anything changed.
bool scale_parameters(GraphModule& module, const ParameterRoles& roles, Report& report,
                      ParameterScaling* live = nullptr);

// Tags every parameter: by its role, else as before, else (no replaced operator uses it, so its learning rate does not
// depend on the width) as Bias if it has one dimension or none, as Norm if more.
void tag_parameters(const GraphModule& module, const ParameterRoles& roles,
                    const std::unordered_map<std::string, int64_t>& depth_of, MupTable& tags);

}  // namespace plumb
