// A graph, or a tensor's type, in a few words.
#pragma once

#include <string>

#include "plumb/graph/graph.h"

namespace plumb {

// "f32[2, 3]", with a symbol where a dimension has one, and "@cuda:0" behind it if it is not on the CPU.
std::string type_text(const TensorMeta& meta);
// "6 operators, (x: f32[2, 3]) -> (f32[2, 4])"; of many inputs and outputs the first ones.
std::string summary(const Graph& graph);

}  // namespace plumb
