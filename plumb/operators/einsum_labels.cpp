#include "plumb/operators/einsum_labels.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace plumb {
namespace {

// `hidden`: the number of dimensions under an ellipsis.
std::vector<std::string> labels_of(std::string_view term, size_t hidden) {
  std::vector<std::string> labels;
  for (size_t i = 0; i < term.size(); ++i) {
    if (std::isalpha(static_cast<unsigned char>(term[i]))) labels.emplace_back(1, term[i]);
    if (!term.substr(i).starts_with("...")) continue;
    for (size_t k = hidden; k > 0; --k) labels.push_back("." + std::to_string(k));
    i += 2;
  }
  return labels;
}

}  // namespace

EinsumLabels einsum_labels(std::string_view equation, std::span<const size_t> dims) {
  const size_t arrow = equation.find("->");
  std::string_view terms = equation.substr(0, arrow);
  EinsumLabels found;
  size_t most_hidden = 0;
  for (const size_t each : dims) {
    const size_t comma = terms.find(',');
    const std::string_view term = terms.substr(0, comma);
    terms = comma == std::string_view::npos ? std::string_view() : terms.substr(comma + 1);
    const size_t letters = labels_of(term, 0).size();
    const size_t hidden = term.find("...") != std::string_view::npos && each > letters ? each - letters : 0;
    most_hidden = std::max(most_hidden, hidden);
    found.operands.push_back(labels_of(term, hidden));
  }
  if (arrow != std::string_view::npos) {
    found.result = labels_of(equation.substr(arrow + 2), most_hidden);
    return found;
  }
  found.result = labels_of("...", most_hidden);
  std::map<std::string, int> count;
  for (const auto& operand : found.operands) {
    for (const std::string& label : operand) ++count[label];
  }
  for (const auto& [label, times] : count) {
    if (label[0] != '.' && times == 1) found.result.push_back(label);
  }
  return found;
}

}  // namespace plumb
