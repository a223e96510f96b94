// Says which values may share memory, and which nodes write which memory. Built once in near-linear time from the
// operators' schemas; not kept up to date: build it again after an edit.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"

namespace plumb {

// Memory is divided in classes: values of different classes never share memory, values of one class may.
class Aliases {
 public:
  using Memory = uint32_t;

  // Assumptions about memory that the graph does not make itself.
  enum class Inputs : uint8_t {
    MayOverlapWritten,  // inputs may overlap each other and the state, as soon as the graph writes any of them
    Distinct,
  };

  // With `state`, names of one tensor or of tensors on one storage are one memory; without, every name is its own.
  explicit Aliases(const Graph& graph, const State* state = nullptr, Inputs inputs = Inputs::MayOverlapWritten);

  // Returns the memory class of a value of this graph. Throws Error(Internal) for any other value.
  Memory memory(const Value* value) const;
  bool may_alias(const Value* a, const Value* b) const { return memory(a) == memory(b); }

  // Inputs and state: the caller sees writes to it.
  bool is_external(Memory m) const { return flags_[m] & kExternal; }
  // Returns whether a value that the graph returns is in it.
  bool is_returned(Memory m) const { return flags_[m] & kReturned; }
  bool is_written(Memory m) const { return flags_[m] & kWritten; }
  // Returns the last node that writes it; null if none does.
  const Node* last_write(Memory m) const;

  // Memory that running the node writes; memory of its inputs. Each once.
  const std::vector<Memory>& written(const Node* node) const;
  std::vector<Memory> read(const Node* node) const;

 private:
  enum Flag : uint8_t { kExternal = 1, kReturned = 2, kWritten = 4 };

  Memory id(const Value* value);
  Memory attribute(const std::string& name);
  Memory find(Memory m) const;
  void unite(Memory a, Memory b);
  void add_node(const Node& node);
  std::vector<Memory> writes_of(const Node& node);
  void tidy(std::vector<Memory>& list) const;

  const State* state_;
  mutable std::vector<Memory> parent_;
  std::vector<uint8_t> flags_;
  std::unordered_map<const Value*, Memory> ids_;
  std::unordered_map<const void*, Memory> storages_;
  std::unordered_map<std::string, Memory> names_;
  std::unordered_map<const Node*, std::vector<Memory>> writes_;  // memory written by each node; no entry if none
  std::unordered_map<Memory, const Node*> last_write_;
};

// True if running the node does more than its results, writes and random draws show (a Python function, a tracker, a
// communication, an operator without results). Such a node has to stay, and only once.
bool has_hidden_effects(const Node& node);

// True if running the node may write memory: that of its written inputs, or of any if it runs opaque code.
bool may_write(const Node& node);

// Returns the tensor that a node writes and gives back as this result, as in-place operators do; null for other values.
Value* written_as(const Value* result);

// Appends the values in an argument, those of a list's elements too.
void collect_values(const Arg& arg, std::vector<Value*>& out);

// True for operators whose result is not a function of their arguments: uninitialized memory.
bool is_uninitialized(const Node& node);

// Which values show memory that torch.empty and the like make, and whether an operator has written any of it. Takes a
// graph's nodes in order.
class UninitializedMemory {
 public:
  // Takes the next node.
  void pass(const Node& node);
  // Returns whether the value is a result of such an operator or a view of one.
  bool holds(const Value* value) const { return written_.contains(base_of(value)); }
  // Returns whether it is one that no operator so far has written.
  bool is_unwritten(const Value* value) const;

 private:
  const Value* base_of(const Value* value) const;

  std::unordered_map<const Value*, const Value*> base_;  // by view: the result that it shows
  std::unordered_map<const Value*, bool> written_;       // by result
};

// Returns the entries of the state that the graph writes, one a node that reads them: running statistics, the table of
// an embedding that keeps its rows below a norm.
std::vector<const Attr*> written_state(const Graph& graph, const State& state);

// Returns the numbers of the inputs that the graph writes, inputs taken to share no memory.
std::vector<size_t> written_inputs(const Graph& graph);

// Returns whether the node takes the sizes, the dtype or the device of its inputs and no value of theirs.
bool looks_at_shape_only(const Node& node);

// Returns whether the result is the input without its gradient.
bool is_detach(const Node& node);

// Which values may carry a gradient back to an input or parameter. Floating inputs always may.
class GradientFlow {
 public:
  GradientFlow(const Graph& graph, const Aliases& aliases, const State* state);
  bool may_require_grad(const Value* value) const;

 private:
  const Aliases& aliases_;
  std::unordered_map<const Value*, bool> values_;
  std::unordered_map<Aliases::Memory, bool> memories_;
};

}  // namespace plumb
