// Writes the IR as the graph and signature of an exported program.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "plumb/exported/exported.h"
#include "plumb/exported/json_doc.h"
#include "plumb/exported/pt2_types.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/weights.h"
#include "plumb/graph/graph.h"
#include "plumb/graph/graph_module.h"

namespace plumb::pt2 {

class GraphWriter {
 public:
  GraphWriter(const Graph& graph, const State& state, const ExportedProgram& program);

  // Returns {"graph": ..., "signature": ...}. Throws Error(InvalidArgument) naming the node that a file cannot hold.
  Json write();
  // After write(): what the archive stores, and the ranges of symbols.
  const std::vector<ToStore>& weights() const { return weights_; }
  const std::vector<ToStore>& constants() const { return constants_; }
  const std::map<std::string, SizeRange>& ranges() const { return ranges_; }

 private:
  // One graph of the file: the program's own, or that of a no_grad region.
  struct Level {
    Json inputs = Json::array(), outputs = Json::array(), nodes = Json::array();
    Json tensors = Json::object(), ints = Json::object(), floats = Json::object(), bools = Json::object();
    Json finish() &&;
  };

  std::string fresh_name(const std::string& hint);
  const std::string& name_of(const Value* value) const { return names_.at(value); }
  void name_values();
  void read_checks();
  void write_state(Level& level, Json& specs);
  void write_placeholder(const Node& node, Level& level, Json& specs);
  void write_output(const Node& node, Level& level, Json& specs);

  void write_node(const Node& node, Level& level);
  void write_region(const std::vector<const Node*>& nodes, Level& level);
  Json inputs_of(const Node& node) const;
  Json argument(const Node& node, const Arg& arg, const c10::Argument& schema) const;
  Json list(const Node& node, const Arg::List& items) const;
  Json constant(const Node& node, const c10::IValue& value, const c10::Argument* schema) const;
  Json reference(const Value* value) const;
  Json define(const Value* value, Level& level);  // notes its type in the level
  Json outputs_of(const Node& node, Level& level);
  SymExpr expression(const Value* value);
  Json expression_json(const Value* value);
  [[noreturn]] void refuse(const Node& node, const std::string& why, const std::string& remedy = "") const;

  const Graph& graph_;
  const State& state_;
  const ExportedProgram& program_;
  Spelling spelling_;
  std::unordered_map<const Value*, std::string> names_;
  std::unordered_set<std::string> taken_;
  std::unordered_map<std::string, size_t> counters_;
  std::unordered_map<const Value*, c10::IValue> constant_inputs_;
  std::map<std::string, SizeRange> ranges_;
  std::map<std::string, int64_t> hints_;  // example values of symbols, from the placeholders' sizes
  std::unordered_map<const Value*, SymExpr> expressions_;
  size_t fresh_symbols_ = 0;
  std::vector<ToStore> weights_, constants_;
};

// Returns one entry a flattened tensor result (nothing for an undefined one); empty if torch cannot be asked: an input
// has no known type, an argument is a size known only when it runs, or the operator has no meta kernel.
std::vector<std::optional<TensorMeta>> infer_types(const c10::OperatorHandle& op, const std::vector<Arg>& args);

}  // namespace plumb::pt2
