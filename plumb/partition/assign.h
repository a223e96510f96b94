// Inside of split(): which operator goes to which stage.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"
#include "plumb/partition/split.h"

namespace plumb {

// The memory classes of a graph (graph/aliases.h) that some node writes, as lists: what a cut has to keep together.
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

namespace plumb::detail {

struct Assignment {
  int num_stages = 1;
  std::vector<Node*> ops;                      // by stage, then in graph order
  std::unordered_map<const Node*, int> stage;  // stage of every op; the output node counts to the last stage
  std::unordered_set<const Node*> copied;      // nodes that every stage that needs them makes for itself
  std::vector<std::string> notes;              // cuts that were moved
};

// Returns nodes that depend on no input and no gradient, draw nothing, write nothing and are cheap enough to be made
// twice.
std::unordered_set<const Node*> nodes_to_copy(const Graph& graph, const State& state, const MemorySets& memory);

// Returns the nodes that get a stage, in graph order: operators but marks and those that are copied.
std::vector<Node*> nodes_to_assign(const Graph& graph, const std::unordered_set<const Node*>& copied);

// Returns the range without cuts because of a written memory: (first, last] in the operators' positions, of which there
// are `end`. `writers_only`: its other users may be in other stages.
std::pair<size_t, size_t> closed_range(const MemorySets::Set& set,
                                       const std::unordered_map<const Node*, size_t>& position, size_t end,
                                       bool writers_only = false);

Assignment assign_stages(const Graph& graph, const State& state, const MemorySets& memory, const SplitOptions& options);

// A place where a cut would change what a node sees.
struct Conflict {
  const MemorySets::Set* set = nullptr;
  const Node* writer = nullptr;
  const Node* other = nullptr;
  std::string why;
};
std::optional<Conflict> find_conflict(const Graph& graph, const MemorySets& memory, const Assignment& assignment);

}  // namespace plumb::detail
