// Pictures of graphs.
#pragma once

#include <string>

#include "plumb/graph/graph.h"

namespace plumb::cli {

// One self-contained SVG: nodes in layers from inputs (top) to output, hovering shows module, source and type.
std::string to_svg(const Graph& graph);
// Graphviz' language.
std::string to_dot(const Graph& graph);

}  // namespace plumb::cli
