#include "plumb/analysis/diff_page.h"

#include <map>

namespace plumb {
namespace {

using Found = DiffTensor::State;

// Returns a line for every tensor of the graph, without states that do not differ.
std::vector<PictureLine> lines_of(const DiffReport& report) {
  std::vector<PictureLine> lines;
  std::map<size_t, size_t> places;
  for (size_t i = 0; i < report.tensors.size(); ++i) {
    const DiffTensor& each = report.tensors[i];
    const HistoryTensor& tensor = each.tensor;
    const Found worst = std::max(each.value, each.gradient);
    const bool is_state = tensor.operation == "parameter" || tensor.operation == "buffer";
    if (is_state && worst <= Found::Equal) continue;
    const bool is_operator = tensor.is_computed();
    PictureLine line{.title = is_operator ? tensor.operation : tensor.operation + " " + tensor.name};
    line.hint = tensor.name;
    line.detail = c10::str(tensor.sizes);
    if (is_operator) line.module = tensor.module;
    for (const uint32_t input : tensor.inputs) {
      if (const auto from = places.find(input); from != places.end()) line.inputs.push_back(from->second);
    }
    if (worst == Found::Follows) line.ground = "#fed7aa";
    if (worst == Found::Differs) line.ground = "#e9d5ff";
    if (each.value == Found::First || each.gradient == Found::First) line.ground = "#fca5a5";
    places[i] = lines.size();
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace

HtmlReport diff_page(const DiffReport& report, const std::string& more) {
  HtmlReport page("Where two runs part", report.a + " and " + report.b);
  page.section(report.first ? "The first difference" : "No difference").prose(report.conclusion());
  page.prose(report.statement());
  if (!more.empty()) page.prose(more);
  if (!report.first) return page;
  page.section("The graph")
      .prose("Red: the first that differs. Orange: what follows from it. Violet: what differs too.");
  page.add(lines_of(report));
  page.section("Tensors that differ").add(report.table(1000));
  return page;
}

}  // namespace plumb
