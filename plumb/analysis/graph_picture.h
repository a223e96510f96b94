// Pictures of graphs: a node a line in the graph's order, in the boxes of its modules, and wires around them.
#pragma once

#include <map>
#include <string>

#include "plumb/graph/graph.h"

namespace plumb {

// Draws a picture that stands alone. Parameters stand on the line of their first user. A wire to the next line is
// straight; every other one runs beside all boxes, in a lane that wires of other values leave free. Hovering shows
// module, source and type.
std::string graph_svg(const Graph& graph);

// Returns graph_svg() for a page, over its whole width: a click on a module folds it, a search marks lines and unfolds
// the modules that hold them, and the wires of the line under the pointer stand out. A graph of more than 40 lines
// opens folded. Numbered neighbors with the same lines are one line, "layers 0 to 31: 32 x"; a click shows each.
// `marks`: lines with another title than their operator's name, or another ground than white ("#fca5a5").
struct LineMark {
  std::string title, color;
};
using LineMarks = std::map<const Node*, LineMark>;
std::string graph_html(const Graph& graph, const LineMarks& marks = {});

// Returns "38 nodes in 12 modules, 16 parameters. The operator that is used most is aten::linear (9 times)."
std::string conclusion(const Graph& graph);

// Returns the graph in Graphviz' language.
std::string graph_dot(const Graph& graph);

}  // namespace plumb
