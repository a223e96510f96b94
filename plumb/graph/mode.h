// The training mode of a node.
#pragma once

#include <optional>
#include <string_view>

#include "plumb/graph/graph.h"

namespace plumb {

// Returns the argument that holds the node's training mode: "train", "training", or "use_input_stats" of an instance
// norm. nullopt if it has none, takes it from the graph, or is a norm without running statistics, which computes the
// same in both modes.
inline std::optional<std::string_view> mode_argument(const Node& node) {
  if (!node.is_call()) return std::nullopt;
  if (const Arg* statistics = node.try_arg("running_mean"); statistics && statistics->is_none()) return std::nullopt;
  for (const std::string_view name : {"train", "training", "use_input_stats"}) {
    if (const Arg* mode = node.try_arg(name); mode && mode->is_constant()) return name;
  }
  return std::nullopt;
}

}  // namespace plumb
