// Pictures of graphs: a node a line in the graph's order, in the boxes of its modules, and wires around them.
#pragma once

#include <string>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

// A line of a picture.
struct PictureLine {
  std::string title, detail, hint;  // beside the title; while the pointer is over it
  std::string module, where;        // the module's path; the line of the source
  std::vector<size_t> inputs;       // lines before this one
  std::string ground = "white", edge = "#2563eb";
};

// Returns a line for each node. Parameters stand on the line of their first user.
std::vector<PictureLine> picture_lines(const Graph& graph);

// Draws a picture that stands alone. A wire to the next line is straight; every other one runs beside all boxes, in a
// lane that wires of other values leave free. Hovering shows module, source and type.
std::string graph_svg(const Graph& graph);

// Returns graph_svg() for a page, over its whole width: a click on a module folds it, a search marks lines and unfolds
// the modules that hold them, and the wires of the line under the pointer stand out. A graph of more than 40 lines
// opens folded. Numbered neighbors with the same lines are one line, "layers 0 to 31: 32 x"; a click shows each.
std::string graph_html(const std::vector<PictureLine>& lines);

// Returns "38 nodes in 12 modules, 16 parameters. The operator that is used most is aten::linear (9 times)."
std::string conclusion(const Graph& graph);

// Returns the graph in Graphviz' language.
std::string graph_dot(const Graph& graph);

}  // namespace plumb
