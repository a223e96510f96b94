// Reads the nodes of a program's graph into the IR.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "plumb/exported/exported.h"
#include "plumb/exported/json_doc.h"
#include "plumb/exported/pt2_types.h"
#include "plumb/graph/graph.h"

namespace plumb::pt2 {

// Under which modes a stretch of nodes runs.
struct Region {
  bool grad = true;
  struct Autocast {
    at::DeviceType device;
    at::ScalarType dtype;
    bool cache;
  };
  std::optional<Autocast> autocast;
};

// Returns the type of a value under a tag of the file ("as_sym_int", "as_float"); Other if it is no tensor or number.
ValueType type_of_tag(const std::string& tag);

class NodeReader {
 public:
  // The arguments that the names of one graph of the file stand for.
  using Scope = std::unordered_map<std::string, Arg>;

  NodeReader(const JsonDoc& doc, Graph& graph, ExportedProgram& program, std::optional<at::Device> device)
      : doc_(doc), graph_(graph), program_(program), device_(device) {}

  // Throws if any node, also of nested graphs, has an operator that is not registered: names them all.
  void check_operators(const Json& graph) const;
  void read_nodes(const Json& graph, Scope& scope, Region region, int depth = 0);
  // Reads any argument but a graph; values are looked up in the scope.
  Arg read_argument(const Json& argument, const Scope& scope) const;

  // Returns the type that `graph` states for a tensor of this name, on the device asked for.
  std::optional<TensorMeta> meta_of(const Json& graph, const std::string& name);
  // Gives the value the file's name, or one like it if it is taken.
  void name_value(Value* value, const std::string& name);
  static void bind(const JsonDoc& doc, const Json& at, Scope& scope, const std::string& name, Arg arg);
  // Notes the expression of an Int, Float or Bool value.
  void note_expression(const Json& graph, Value* value, const std::string& file_name);

 private:
  const Arg& lookup(const Json& at, const Scope& scope, const std::string& name) const;
  Arg read_sym(const Json& j, const Scope& scope) const;
  void read_node(const Json& node, const Json& graph, Scope& scope, Region& region, int depth);
  void call(const Json& node, const Json& graph, const c10::OperatorHandle& op, Scope& scope, const Region& region);
  void size_arithmetic(const Json& node, const Json& graph, const std::string& target, Scope& scope,
                       const Region& region);
  bool read_flag(const Json& input, bool otherwise, const Scope& scope) const;
  std::optional<Region::Autocast> read_autocast(const Json& inputs, const Scope& scope) const;
  void nested(const Json& node, const Json& graph, const std::string& kind, Scope& scope, Region region, int depth);
  void add_casts(const Json& node, const Json& graph, const c10::OperatorHandle& op, std::vector<Arg>& args,
                 const Region& region);
  // Gives the results of the nested graph to the names that its node has for them.
  void bind_nested_outputs(const Json& outputs, const Json& results, Scope& scope, const Scope& inner);
  void bind_outputs(const Json& node, const Json& graph, Node* made, Scope& scope);
  void bind_output(const Json& out, const Json& graph, Value* value, Scope& scope);
  void set_origin(const Json& node, Node* made, const Region& region);

  const JsonDoc& doc_;
  Graph& graph_;
  ExportedProgram& program_;
  std::optional<at::Device> device_;
  std::unordered_map<std::string, std::shared_ptr<const ModuleStack>> stacks_;
  std::unordered_map<std::string, std::shared_ptr<const SourceLocation>> sources_;
  std::unordered_map<Value*, Value*> cast_weights_;  // weight -> cast in the autocast region being read, if it caches
};

}  // namespace plumb::pt2
