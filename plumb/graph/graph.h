// The IR. A Graph owns an ordered list of Nodes; a Node has an operator, arguments and results; a result is a Value,
// which knows its producer and its uses. SSA: every value is produced once, before its uses.
//
//   Graph g;
//   Value* x = g.placeholder("x", meta)->result();
//   Value* w = g.get_attr("fc.weight", meta)->result();
//   Value* y = g.call("aten::linear", {x, w})->result();
//   g.output({y});
//
// Editing keeps use lists right by construction. Pointers to nodes and values stay valid until they are erased.
// A graph may be read from several threads; editing needs one.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plumb/graph/arg.h"
#include "plumb/graph/meta.h"

namespace plumb {

class Graph;
struct OperatorFacts;
class Node;

enum class NodeKind : uint8_t {
  Placeholder,   // an input; target() is the name the user gave it
  GetAttr,       // a parameter, buffer or constant; target() is its fully qualified name
  CallFunction,  // a dispatcher operator; target() is "aten::add.Tensor"
  Output,        // what the graph returns: its args, flat
};

enum class ValueType : uint8_t { Tensor, Int, Float, Bool, Other };

// Returns whether a value can have this name: letters, digits and _, no digit first.
bool is_identifier(std::string_view name);

// One place where a value is used: the node and the index in its inputs().
struct Use {
  Node* user;
  uint32_t index;
};

class Value {
 public:
  const std::string& name() const { return name_; }  // unique in its graph, an identifier
  Node* producer() const { return producer_; }
  size_t result_index() const { return index_; }  // position in producer()->results()
  ValueType type() const { return type_; }
  bool is_tensor() const { return type_ == ValueType::Tensor; }

  // Returns every use, a node as often as it uses the value. The order is deterministic for one sequence of edits only.
  std::span<const Use> uses() const { return uses_; }
  bool has_uses() const { return !uses_.empty(); }
  // Returns the nodes that use it, each once, in graph order.
  std::vector<Node*> users() const;

  const std::optional<TensorMeta>& meta() const { return meta_; }
  void set_meta(std::optional<TensorMeta> meta);
  void set_type(ValueType type);
  // Throws if the name is taken or not an identifier.
  void rename(std::string name);

 private:
  friend class Graph;
  friend class Node;
  Value(Node* producer, size_t index, ValueType type) : producer_(producer), index_(index), type_(type) {}
  Node* producer_;
  size_t index_;
  ValueType type_;
  std::string name_;
  std::vector<Use> uses_;
  std::optional<TensorMeta> meta_;
};

class Node {
 public:
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  NodeKind kind() const { return kind_; }
  Graph& graph() const { return *graph_; }
  size_t id() const { return id_; }  // below graph().id_end(); no other node of the graph has had it
  const std::string& target() const { return target_; }
  // "node %linear_3 (aten::linear)": for messages.
  std::string describe() const;

  // CallFunction: the operator. op() throws for other kinds.
  const c10::OperatorHandle& op() const;
  const c10::FunctionSchema& schema() const { return op().schema(); }
  bool is_call() const { return kind_ == NodeKind::CallFunction; }
  // True for a CallFunction of this operator: "aten::add.Tensor", or "aten::add" for any overload.
  bool is_op(std::string_view name) const;
  // The operator's row of the table in operators/operator_facts.h; one that says nothing for other kinds.
  const OperatorFacts& facts() const { return *facts_; }
  // Operator name without the overload, "aten::add"; target() for other kinds.
  std::string_view op_name() const;

  // Arguments in the schema's order, complete: defaults are filled in.
  std::span<const Arg> args() const { return args_; }
  const Arg& arg(size_t i) const;
  const Arg& arg(std::string_view schema_name) const;      // throws if the schema has no such argument
  const Arg* try_arg(std::string_view schema_name) const;  // null if it has not
  void set_arg(size_t i, Arg arg);
  void set_arg(std::string_view schema_name, Arg arg);

  // The values among the arguments, flattened, in order, repeated if used twice.
  size_t num_inputs() const { return inputs_.size(); }
  Value* input(size_t i) const;  // throws if there are fewer: a tensor argument may be a number or None
  std::vector<Value*> inputs() const;
  void set_input(size_t i, Value* value);  // O(1)

  // Results, flattened: an operator returning (Tensor, Tensor[]) with two elements has three.
  size_t num_results() const { return results_.size(); }
  Value* result(size_t i = 0) const;
  std::vector<Value*> results() const;
  // One entry a return of the schema: -1 for a single value, else the number of elements of a list.
  const std::vector<int32_t>& result_layout() const { return layout_; }

  NodeMeta& meta();  // counts as an edit
  const NodeMeta& meta() const { return meta_; }

  // Returns whether this node comes before the other in the graph. Amortized O(1).
  bool is_before(const Node* other) const;
  Node* next() const { return next_; }  // null after the last
  Node* prev() const { return prev_; }

  // --- what running it does (from the schema) ---
  // Inputs whose memory it writes (in-place and out= operators).
  std::vector<Value*> written_inputs() const;
  bool writes() const;
  bool result_aliases_input() const;  // any result may share memory with an input (views and in-place)
  bool is_random() const;             // draws from a generator (dropout in training counts)
  // Must stay even if nobody uses its results: writes, random draws, no results, python_function.
  bool has_side_effects() const;

 private:
  friend class Graph;
  friend class Value;
  struct Input {
    Value* value;
    Arg* slot;           // where in args_ the value stands
    uint32_t use_index;  // where in value->uses_ this use stands
  };
  Node(Graph* graph, NodeKind kind);
  void attach_inputs();
  void detach_inputs();
  void remove_use(size_t input);

  Graph* graph_;
  size_t id_;
  NodeKind kind_;
  std::string target_;
  std::optional<c10::OperatorHandle> op_;
  const OperatorFacts* facts_;
  std::vector<Arg> args_;
  std::vector<Input> inputs_;
  std::vector<std::unique_ptr<Value>> results_;
  std::vector<int32_t> layout_;
  NodeMeta meta_;
  Node* prev_ = nullptr;
  Node* next_ = nullptr;
  uint64_t position_ = 0;
};

// Nodes in order; the next node is read before the loop's body runs, so the body may erase the current one.
class NodeRange {
 public:
  class iterator {
   public:
    explicit iterator(Node* n) : node_(n), next_(n ? n->next() : nullptr) {}
    Node* operator*() const { return node_; }
    iterator& operator++() {
      node_ = next_;
      next_ = node_ ? node_->next() : nullptr;
      return *this;
    }
    bool operator!=(const iterator& o) const { return node_ != o.node_; }

   private:
    Node* node_;
    Node* next_;
  };
  explicit NodeRange(Node* first) : first_(first) {}
  iterator begin() const { return iterator(first_); }
  iterator end() const { return iterator(nullptr); }

 private:
  Node* first_;
};

// Returns the full name of an operator: "aten::add.Tensor", "aten::linear".
std::string operator_name(const c10::OperatorHandle& op);
// Finds "aten::add.Tensor" ("." and overload left out: the overload named ""; "default" is accepted for it).
// find_ throws an Error naming near misses; try_ returns nothing.
c10::OperatorHandle find_operator(std::string_view name);
std::optional<c10::OperatorHandle> try_find_operator(std::string_view name);

class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;

  // Returns a deep copy. `map`, if given, receives old node -> new node.
  Graph clone(std::unordered_map<const Node*, Node*>* map = nullptr) const;

  // --- reading ---
  NodeRange nodes() const { return NodeRange(first_); }
  Node* first() const { return first_; }
  Node* last() const { return last_; }
  size_t size() const { return size_; }
  size_t id_end() const { return id_end_; }  // above the ids of all nodes
  std::vector<Node*> placeholders() const;
  std::vector<Node*> attributes() const;           // get_attr nodes
  Node* output_node() const { return output_; }    // null until output() was called
  Value* find_value(std::string_view name) const;  // null if there is none

  // --- building: at the insertion point, by default before the output node or at the end ---
  Node* placeholder(std::string name, std::optional<TensorMeta> meta = std::nullopt,
                    ValueType type = ValueType::Tensor);
  Node* get_attr(std::string target, std::optional<TensorMeta> meta = std::nullopt);
  // Arguments by position; the rest take the schema's defaults. Throws if they do not fit the schema.
  // list_sizes: for every list among the returns, how many elements it has here.
  Node* call(std::string_view op, std::vector<Arg> args, std::vector<int32_t> list_sizes = {});
  Node* call(const c10::OperatorHandle& op, std::vector<Arg> args, std::vector<int32_t> list_sizes = {});
  // Sets what the graph returns (flat); replaces an earlier output.
  Node* output(std::vector<Arg> values);

  // New nodes go before/after `node` while the guard lives.
  class InsertGuard {
   public:
    InsertGuard(Graph* graph, Node* before) : graph_(graph), saved_(graph->insert_before_) {
      graph->insert_before_ = before;
    }
    ~InsertGuard() { graph_->insert_before_ = saved_; }
    InsertGuard(const InsertGuard&) = delete;
    InsertGuard& operator=(const InsertGuard&) = delete;

   private:
    Graph* graph_;
    Node* saved_;
  };
  [[nodiscard]] InsertGuard inserting_before(Node* node) { return InsertGuard(this, node); }
  [[nodiscard]] InsertGuard inserting_after(Node* node) { return InsertGuard(this, node->next()); }

  // --- editing ---
  // O(uses). Does not touch uses by `except`.
  void replace_all_uses_with(Value* from, Value* to, const Node* except = nullptr);
  // Replaces a node by one with as many results: moves uses and names, copies meta where the new one has none, erases
  // `from`.
  void replace_node(Node* from, Node* to);
  // Throws if a result still has uses.
  void erase(Node* node);
  // Returns a fresh, unused name made from `hint` ("linear" -> "linear_3").
  std::string unique_name(std::string_view hint);

  // A counter that every edit increments: caches key on it.
  uint64_t version() const { return version_; }
  // Hash of everything that the text shows.
  uint64_t hash() const;

 private:
  friend class Node;
  friend class Value;
  friend class NodeRange;
  friend void lint(const Graph& graph);
  Node* insert(std::unique_ptr<Node> node, std::string_view name_hint);
  void link(Node* node, Node* before);
  void unlink(Node* node);
  void renumber();
  void clear();
  void add_results(Node* node, const std::vector<int32_t>& list_sizes);

  Node* first_ = nullptr;
  Node* last_ = nullptr;
  Node* output_ = nullptr;
  Node* insert_before_ = nullptr;
  size_t size_ = 0, id_end_ = 0;
  uint64_t version_ = 0;
  mutable std::atomic<uint64_t> sound_version_ = UINT64_MAX;  // at which lint() found no fault
  std::unordered_map<std::string_view, Value*> names_;        // the texts are the values' own
  std::unordered_map<std::string, uint64_t> counters_;
};

// The graph as text, one node a line; deterministic. parse_graph(to_string(g)) prints the same text again.
struct PrintOptions {
  bool types = true;
  bool locations = true;  // module stack and source line
};
std::string to_string(const Graph& graph, const PrintOptions& options = {});
// Throws an Error that names line and column.
Graph parse_graph(std::string_view text);
// parse_graph() of a text that this process wrote itself: it may name every operator.
Graph parse_trusted_graph(std::string_view text);

// Checks order, use lists, schemas, names, one output; throws an Error (InvalidGraph) that names the node.
void lint(const Graph& graph);

}  // namespace plumb
