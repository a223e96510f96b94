// The memory classes of a graph (graph/aliases.h) that some node writes, as lists: what a cut has to keep together.
#pragma once

#include <unordered_map>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"

namespace plumb {

class MemorySets {
 public:
  struct Set {
    std::vector<Value*> values;  // in graph order
    std::vector<Node*> writers;  // in graph order, each once
    bool has_state = false;      // a parameter, buffer or constant is among them
    bool has_input = false;      // an input of the graph is among them
  };

  MemorySets(const Graph& graph, const State& state);

  // Returns one for each class that some node writes. Memory in no set may be copied freely.
  const std::vector<Set>& written() const { return written_; }
  // Returns the written set that holds a value, or null.
  const Set* written_set(const Value* value) const;

 private:
  std::unordered_map<const Value*, size_t> set_of_;
  std::vector<Set> written_;
};

// Lets every use after an in-place operator take the operator's result instead of the value it wrote: the same tensor,
// in SSA form. Returns whether anything changed.
bool rename_after_writes(Graph& graph);

}  // namespace plumb
