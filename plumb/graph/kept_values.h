// Autograd's error about a value that was written after an operator had kept it for its backward, which names no node.
#pragma once

#include <exception>

#include "plumb/graph/graph.h"

namespace plumb {

// Throws the error of a backward again, within its catch block. One about a kept value becomes an Error that also names
// the nodes that write in place: those that write a result of the operator it is about, or all if there are none.
[[noreturn]] void rethrow_with_writes(const Graph& graph, const std::exception& error);

// Runs a backward of the graph's values. Throws Error(ExecutionFailed) for a kept value that was written.
template <class Run>
auto run_backward_of(const Graph& graph, const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    rethrow_with_writes(graph, error);
  }
}

}  // namespace plumb
