// Autograd's errors of a backward, which name no node of the graph whose values it runs over: a value was written after
// an operator had kept it, or an operator has no derivative.
#pragma once

#include <exception>

#include "plumb/graph/graph.h"

namespace plumb {

// Throws the error of a backward again, within its catch block. One of the two above becomes an Error that also names
// nodes: those that write a result of the operator it is about (all that write, if none does), or those without a
// derivative.
[[noreturn]] void rethrow_named(const Graph& graph, const std::exception& error);

// Runs a backward of the graph's values. Throws Error(ExecutionFailed) for a kept value that was written and for an
// operator without a derivative.
template <class Run>
auto run_backward_of(const Graph& graph, const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    rethrow_named(graph, error);
  }
}

}  // namespace plumb
