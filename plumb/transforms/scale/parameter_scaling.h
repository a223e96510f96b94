// Stage 5 of unit_scale on a live model: weights and biases are scaled where they are, at once, by what their layers
// say they are, and the model's graph, made later, confirms it or takes it back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "plumb/transforms/module.h"
#include "plumb/transforms/report.h"
#include "plumb/transforms/scale/equivalents.h"

namespace plumb {

enum class ScaledKind : uint8_t { Weight, Bias };

// A weight's values as they are in float32 (or float64), and their standard deviation. No deviation if there is none to
// divide by: a single value, or one that is not finite and positive; `obstacle` says why.
struct WeightScale {
  at::Tensor wide;
  double std = 1;
  std::string obstacle;
};
WeightScale measure_weight(const at::Tensor& weight);

class ParameterScaling {
 public:
  // A parameter of the live model under all of its names, and what its layer says it is.
  struct Proposal {
    std::vector<std::string> names;
    at::Tensor parameter;
    std::optional<ScaledKind> kind;  // none: nothing is known yet
  };

  // Divides weights by their standard deviation and sets biases to zero, in place. Remembers how to undo that, and
  // every parameter's version. Returns the first names of the parameters that changed.
  std::vector<std::string> propose(const std::vector<Proposal>& proposals);

  // --- confirm by a graph: called by unit_scale for every parameter that the graph's operators use ---
  // Returns whether it was scaled or confirmed before. From here on it counts as confirmed.
  bool confirm(const std::vector<std::string>& names);
  // Writes values of a parameter that was not proposed. Returns false if it has changed since propose(). Throws
  // Error(InvalidState) after freeze().
  bool write(const std::vector<std::string>& names, const at::Tensor& parameter, const at::Tensor& values);
  // Restores a parameter's own values, unless a graph has confirmed it or somebody has changed it since propose().
  // Returns whether it did. Throws Error(InvalidState) after freeze(), unless a graph has confirmed it.
  bool undo(const std::vector<std::string>& names, const at::Tensor& parameter);
  // Restores a parameter's own values for what no graph shows; values that somebody has put there since propose() are
  // its own. Returns false if a graph has confirmed it. Throws Error(InvalidState) as undo() does.
  bool give_back(const std::vector<std::string>& names, const at::Tensor& parameter);
  // Adds an entry for every scaled parameter that the report does not name yet.
  void add_to(Report& report) const;

  // Notes the name of what has copied, sharded or replaced the parameters since propose(); "" if nothing has. A change
  // here would not reach the copies on other ranks, or the parameters themselves, and is refused.
  void freeze(std::string by) { frozen_by_ = std::move(by); }
  // Notes that other values were put there, or another tensor (load_state_dict).
  void mark_changed(const std::string& name);
  // Notes that a parameter of the name `before`, or a copy of it, has the name `now`, as when its layer was put into
  // another one. Returns whether `before` is known.
  bool rename(const std::string& before, const std::string& now);
  // Notes whether the tensor has changed since propose(). Called before a copy, which does not know the tensor.
  void look_at(const std::string& name, const at::Tensor& tensor, bool buffer);
  // Returns a copy for a copied model, whose tensors are new. Versions of parameters count from zero there, those of
  // buffers from one, because copy.deepcopy fills a plain tensor in place.
  ParameterScaling for_copy() const;

  // For files: (names, kind, std, values before) of every scaled parameter, the confirmed names, and of every name
  // whether somebody has changed it since propose().
  using Saved = std::tuple<std::vector<std::string>, int, double, std::optional<at::Tensor>>;
  std::vector<Saved> scaled() const;
  std::vector<std::string> confirmed() const;
  std::map<std::string, bool> changed() const;
  static ParameterScaling restore(const std::vector<Saved>& scaled, const std::vector<std::string>& confirmed,
                                  const std::map<std::string, bool>& changed);

 private:
  struct Scaled {
    std::vector<std::string> names;
    ScaledKind kind = ScaledKind::Weight;
    double std = 1;     // standard deviation of a weight before it was scaled
    at::Tensor before;  // a bias's own values
  };
  void add(Scaled scaled);
  void forget(Scaled& scaled);
  Scaled* find(const std::vector<std::string>& names);
  bool untouched(const std::vector<std::string>& names, const at::Tensor& parameter) const;
  void remember(const std::vector<std::string>& names, const at::Tensor& parameter);
  void refuse_frozen(const std::vector<std::string>& names);

  std::vector<Scaled> scaled_;           // in the order of the model; no names: undone
  std::map<std::string, size_t> index_;  // by every name
  std::set<std::string> confirmed_;
  // At which version each name's tensor was left; none: somebody has changed it.
  std::map<std::string, std::optional<uint32_t>> versions_;
  std::string frozen_by_;
  std::set<std::string> buffers_;  // names that look_at() has seen as buffers
};

// The weights and biases of the operators that unit_scale replaces.
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

  // Notes which operators were replaced by which nodes.
  void moved(const std::unordered_map<const Node*, const Node*>& replaced);
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
