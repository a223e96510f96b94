#include "plumb/core/error.h"
#include "plumb/graph/graph.h"
#include "plumb/graph/schema_fit.h"

namespace plumb {
namespace {

[[noreturn]] void broken(const Node& node, const std::string& what) {
  throw Error(ErrorKind::InvalidGraph, node.describe() + ": " + what, node.meta().where());
}

void check_node(const Node& node, const Graph& graph) {
  size_t index = 0;
  for (Value* input : node.inputs()) {
    const Node* producer = input->producer();
    if (&producer->graph() != &graph) broken(node, "uses %" + input->name() + " of another graph");
    if (!producer->is_before(&node)) broken(node, "uses %" + input->name() + " before it is produced");
    bool listed = false;
    for (const Use& use : input->uses()) listed = listed || (use.user == &node && use.index == index);
    // A value with many uses is checked from its own side below: here only small lists are searched.
    if (!listed && input->uses().size() < 16) broken(node, "is missing from the uses of %" + input->name());
    ++index;
  }
  for (Value* result : node.results()) {
    if (graph.find_value(result->name()) != result) broken(node, "the name %" + result->name() + " is not its own");
    for (const Use& use : result->uses()) {
      if (use.index >= use.user->num_inputs() || use.user->input(use.index) != result)
        broken(node, "%" + result->name() + " lists a use that is not there");
    }
    if (result->meta() && !result->is_tensor())
      broken(node, "%" + result->name() + " is no tensor but has a tensor's type");
    if (result->meta() && !result->meta()->symbols.empty() &&
        result->meta()->symbols.size() != result->meta()->sizes.size())
      broken(node, "%" + result->name() + " has as many symbols as no tensor of its rank");
  }
  if (node.kind() == NodeKind::CallFunction) {
    const auto& schema = node.schema();
    if (node.args().size() != schema.arguments().size())
      broken(node, "has too many or too few arguments for its schema");
    for (size_t i = 0; i < node.args().size(); ++i) {
      Arg fitted = fit_argument(schema, i, node.arg(i));
      if (!(fitted == node.arg(i)))
        broken(node, "argument '" + schema.arguments()[i].name() + "' is not in the schema's form");
    }
    if (node.result_layout().size() != schema.returns().size()) broken(node, "has other results than its schema");
  }
}

}  // namespace

void lint(const Graph& graph) {
  size_t count = 0;
  bool placeholders_over = false;
  const Node* previous = nullptr;
  for (const Node* node : graph.nodes()) {
    ++count;
    if (&node->graph() != &graph) broken(*node, "belongs to another graph");
    if (previous && (!previous->is_before(node) || node->prev() != previous)) broken(*node, "is out of order");
    if (node->kind() == NodeKind::Placeholder) {
      if (placeholders_over) broken(*node, "an input after other nodes");
    } else {
      placeholders_over = true;
    }
    if (node->kind() == NodeKind::Output && node != graph.last()) broken(*node, "is not the last node");
    check_node(*node, graph);
    previous = node;
  }
  if (count != graph.size()) throw Error(ErrorKind::InvalidGraph, "the graph counts its nodes wrongly");
  if (!graph.output_node() || graph.last() != graph.output_node()) {
    throw Error(ErrorKind::InvalidGraph, "the graph has no output node", "", "call graph.output({...})");
  }
}

}  // namespace plumb
