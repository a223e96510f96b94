// What the transforms hand back: a graph module that knows what was done to it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/transforms/report.h"

namespace plumb {

class ScaleTracker;

// What an optimiser must know of a parameter to scale its learning rate (u-muP, arXiv 2407.17465, table 2).
enum class MupRole {
  Weight,  // of a linear, a convolution or an embedding
  Bias,
  Norm,    // gain of a normalisation
  Output,  // of a readout
};
std::string_view to_string(MupRole role);  // "weight", "bias", "norm", "output": the names of mup_type

struct MupTag {
  MupRole role = MupRole::Weight;
  // How many residual branches the network has, for a parameter inside of one, where the depth rule was chosen.
  std::optional<int64_t> scaling_depth;
  bool operator==(const MupTag&) const = default;
};
using MupTable = std::map<std::string, MupTag>;  // by the parameter's full name

class TransformedModule : public GraphModule {
 public:
  using GraphModule::GraphModule;

  // One for each transform, in order.
  std::vector<Report> reports;
  // Filled by unit_scale: every parameter.
  MupTable mup;
  // Set by track_scales, else null.
  std::shared_ptr<ScaleTracker> tracker;

  // A deep copy that measures into a tracker of its own.
  std::shared_ptr<TransformedModule> deep_copy() const;
};

// A module with a copy of the graph and the same tensors, with what is known of `module`.
std::shared_ptr<TransformedModule> derive(const GraphModule& module);

}  // namespace plumb
