// The stage of unit_scale that rewrites adds: residual layers where one operand is computed from the other, unit-scaled
// adds elsewhere. Not for other rooms.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "plumb/graph/node_set.h"
#include "plumb/transforms/report.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb {

// True for torch's adds of tensors and of numbers, in place or not.
bool is_add(const Node* node);

// Adds of copies become adds of what was copied, so that a skip that is one is seen to be what the branch starts from.
// Returns whether there were any.
bool read_past_copies(GraphModule& module);

struct ScaledAdds {
  bool changed = false;
  std::unordered_map<std::string, int64_t> depth_of;  // TauRule::Depth: residual layers, by parameter on a branch
};

// Adds in `keep` stay what they are. Every other add has an entry in the report; those in `choosing` (choices.h) stay,
// too.
ScaledAdds scale_adds(GraphModule& module, const UnitScaleOptions& options, const NodeSet& keep,
                      const NodeSet& choosing, Report& report);

}  // namespace plumb
