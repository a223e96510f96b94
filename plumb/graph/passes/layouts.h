// Views of results that may be laid out in memory otherwise than when the graph was made. For passes that replace
// operators.
#pragma once

#include "plumb/graph/graph.h"

namespace plumb {

// Norms, softmaxes, attention and residual adds that a pass put in a graph may lay their results out otherwise than
// what they replaced, unless their inputs are rows. Behind them `view` becomes `reshape`, which copies where it has to;
// an operator that reads strides (as_strided, view_as_complex), and a view that is written, gets its input in the
// layout that the graph was made for. Answers whether anything changed.
bool keep_views_working(Graph& graph);

}  // namespace plumb
