// Graphs inside of a capture: modules that replay graphs of their own, or make them at their first call, are captured
// like any others.
#pragma once

#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

class Session;

// While it lives, the capture that runs on this thread, if one does, sees nothing: what a module prepares at its first
// call (its graph, the scale of its weights) is no part of what it computes.
class PausedCapture {
 public:
  PausedCapture();
  ~PausedCapture();
  PausedCapture(const PausedCapture&) = delete;

 private:
  Session* session_;
};

// Returns module.run(inputs). A capture on this thread records the modules and source lines of the graph's nodes, below
// the module that it is in.
std::vector<c10::IValue> run_recorded(GraphModule& module, std::vector<c10::IValue> inputs);

}  // namespace plumb
