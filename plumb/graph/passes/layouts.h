// Views of results with another layout in memory than when the graph was made. For passes that replace operators.
#pragma once

#include "plumb/graph/graph.h"

namespace plumb {

// Replaces `view` by `reshape`, which copies where it has to, behind norms, softmaxes, attention and residual adds that
// a pass put in a graph: their results may have another layout than before, unless their inputs are rows. An operator
// that reads strides (as_strided, view_as_complex), and a view that is written, gets its input in the layout that the
// graph was made for. Returns whether anything changed.
bool keep_views_working(Graph& graph);

}  // namespace plumb
