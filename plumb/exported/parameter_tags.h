// Tags of parameters, for u-muP's learning rates (plumb/graph/parameter_tag.h), in an entry of the archive that
// torch.export hands through as an extra file: {"fc.weight": {"type": "weight", "depth": 4}, ...}.
#pragma once

#include "plumb/exported/json_doc.h"
#include "plumb/graph/state.h"

namespace plumb::pt2 {

inline constexpr const char* kTags = "extra/plumb_parameter_tags.json";
inline constexpr const char* kUnitScaledLayers = "extra/plumb_unit_scaled_layers";  // there or not, with no content

// Of every tagged tensor, by its names.
Json tags_of(const State& state);

// Tags the tensors. Throws Error(BadFile) for what names no tensor of the state, or is no tag.
void give_tags(const JsonDoc& tags, const State& state);

}  // namespace plumb::pt2
