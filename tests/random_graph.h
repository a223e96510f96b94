// Random graphs that run, for property tests: every value has its true type, every operator fits its arguments.
#pragma once

#include <cstdint>

#include "plumb/graph/graph_module.h"

namespace plumb {

struct RandomGraphOptions {
  size_t nodes = 30;    // about; get_attr and inputs not counted
  bool views = true;    // select, slice, transpose, unbind, ...
  bool writes = true;   // in-place operators, also through views, on buffers and on inputs
  bool no_grad = true;  // nodes without gradients
  bool random = true;   // dropout
  bool copies = true;   // equal nodes, dead nodes, constants: what the passes look for
};

// Returns the same graph for the same seed and options. Values are f32 of two or three small dimensions, i64 and
// numbers; the state has parameters (two of them tied), a buffer and a constant. Neither running it nor its backward
// throws an error.
GraphModule random_graph(uint64_t seed, const RandomGraphOptions& options = {});

}  // namespace plumb
