#include "plumb/analysis/diff_page.h"

#include "plumb/graph/graph.h"

namespace plumb {
namespace {

using Found = DiffTensor::State;

// A line of the picture for every tensor of the graph; its inputs come before it.
struct Picture {
  Graph graph;
  LineMarks marks;
};

void draw(const DiffReport& report, Picture& picture) {
  std::vector<Value*> values;
  for (const DiffTensor& each : report.tensors) {
    const HistoryTensor& tensor = each.tensor;
    const Found worst = std::max(each.value, each.gradient);
    const bool is_state = tensor.operation == "parameter" || tensor.operation == "buffer";
    Node* node = nullptr;
    if (is_state && worst <= Found::Equal) {
      node = picture.graph.get_attr(tensor.name);  // drawn with its first user
    } else {
      std::vector<Arg> inputs;
      for (const uint32_t input : tensor.inputs) inputs.emplace_back(values[input]);
      const bool is_operator = tensor.operation.find("::") != std::string::npos;
      // Histories name operators that this process may not know: any operator of a list stands for all.
      node = inputs.empty() ? picture.graph.placeholder(tensor.name)
                            : picture.graph.call("aten::cat", {Arg::List(inputs.begin(), inputs.end())});
      picture.marks[node].title = is_operator ? tensor.operation : tensor.operation + " " + tensor.name;
      if (!tensor.module.empty() && is_operator)
        node->meta().modules = std::make_shared<const ModuleStack>(ModuleStack{{tensor.module, ""}});
    }
    TensorMeta meta;
    meta.sizes = tensor.sizes;
    node->result()->set_meta(meta);
    const bool is_first = each.value == Found::First || each.gradient == Found::First;
    if (is_first) picture.marks[node].color = "#fca5a5";
    if (!is_first && worst == Found::Follows) picture.marks[node].color = "#fed7aa";
    if (!is_first && worst == Found::Differs) picture.marks[node].color = "#e9d5ff";
    values.push_back(node->result());
  }
}

}  // namespace

HtmlReport diff_page(const DiffReport& report, const std::string& more) {
  HtmlReport page("Where two runs part", report.a + " and " + report.b);
  page.section(report.first ? "The first difference" : "No difference").prose(report.conclusion());
  page.prose(report.statement());
  if (!more.empty()) page.prose(more);
  if (!report.first) return page;
  Picture picture;
  draw(report, picture);
  page.section("The graph").prose("Red: the first that differs. Orange: what follows from it. Violet: what differs too.");
  page.add(picture.graph, picture.marks);
  page.section("Tensors that differ").add(report.table(1000));
  return page;
}

}  // namespace plumb
