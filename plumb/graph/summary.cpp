#include "plumb/graph/summary.h"

#include <algorithm>
#include <vector>

#include "plumb/graph/names.h"

namespace plumb {
namespace {

constexpr size_t kMostListed = 6;

std::string listed(const std::vector<std::string>& texts) {
  std::string text;
  for (size_t i = 0; i < std::min(texts.size(), kMostListed); ++i) text += (i ? ", " : "") + texts[i];
  return "(" + text + (texts.size() > kMostListed ? ", ... " + std::to_string(texts.size()) + " in all" : "") + ")";
}

std::string type_of_value(const Value* value) {
  if (value->meta()) return type_text(*value->meta());
  return value->is_tensor() ? "tensor" : "value";
}

}  // namespace

std::string type_text(const TensorMeta& m) {
  std::string text = short_name(m.dtype) + "[";
  for (size_t i = 0; i < m.sizes.size(); ++i) {
    if (i) text += ", ";
    text += i < m.symbols.size() && !m.symbols[i].empty() ? m.symbols[i] : std::to_string(m.sizes[i]);
  }
  return text + "]" + (m.device == at::Device(at::kCPU) ? "" : "@" + m.device.str());
}

std::string summary(const Graph& graph) {
  size_t operators = 0;
  for (const Node* node : graph.nodes()) operators += node->is_call();
  std::vector<std::string> in, out;
  for (const Node* p : graph.placeholders()) in.push_back(p->target() + ": " + type_of_value(p->result()));
  if (const Node* output = graph.output_node()) {
    for (const Arg& arg : output->args()) out.push_back(arg.is_value() ? type_of_value(arg.value()) : "constant");
  }
  return std::to_string(operators) + (operators == 1 ? " operator, " : " operators, ") + listed(in) + " -> " +
         listed(out);
}

}  // namespace plumb
