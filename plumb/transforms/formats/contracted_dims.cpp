#include "plumb/transforms/formats/contracted_dims.h"

#include <algorithm>
#include <string>

#include "plumb/operators/einsum_labels.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

using Labels = std::vector<std::string>;

bool has(const Labels& labels, const std::string& label) { return std::ranges::find(labels, label) != labels.end(); }

// Returns the last dimension, from the end, whose label fits; 0 if none does.
template <class Fits>
int64_t last_where(const Labels& labels, const Fits& fits) {
  for (size_t i = labels.size(); i-- > 0;) {
    if (fits(labels[i])) return static_cast<int64_t>(i) - static_cast<int64_t>(labels.size());
  }
  return 0;
}

std::optional<ContractedDims> of_einsum(const Arg::List& tensors, const std::string& equation, const State& state) {
  std::vector<size_t> dims;
  for (const Arg& tensor : tensors) dims.push_back(tensor.is_value() ? sizes_of(tensor.value(), state).size() : 0);
  const EinsumLabels labels = einsum_labels(equation, dims);
  ContractedDims found;
  std::string chosen;  // the label along which an operand before has its blocks
  for (const Labels& mine : labels.operands) {
    const auto summed = [&](const std::string& label) { return !has(labels.result, label); };
    const auto shared = [&](const std::string& label) {
      return summed(label) && std::ranges::any_of(labels.operands, [&](const Labels& other) {
               return &other != &mine && has(other, label);
             });
    };
    int64_t dim = last_where(mine, [&](const std::string& label) { return label == chosen; });
    if (dim == 0) dim = last_where(mine, shared);
    found.operands.push_back(dim != 0 ? dim : -1);
    if (dim != 0 && chosen.empty()) chosen = mine[mine.size() - static_cast<size_t>(-dim)];
  }
  if (chosen.empty()) return std::nullopt;
  const int64_t of_others =
      last_where(labels.result, [&](const std::string& label) { return !has(labels.operands[0], label); });
  found.result = of_others != 0 ? of_others : -1;
  return found;
}

// Returns the last of the dimensions that an argument lists, as it says it; nullopt for none.
std::optional<int64_t> last_listed(const Node* node, const char* argument) {
  const Arg& dims = node->arg(argument);
  if (!dims.is_constant() || !dims.constant().isIntList()) return -1;
  const std::vector<int64_t> listed = dims.constant().toIntVector();
  return listed.empty() ? std::nullopt : std::optional(listed.back());
}

}  // namespace

std::optional<ContractedDims> contracted_dims(const Node* node, const State& state) {
  const Contraction& contraction = node->facts().contraction;
  if (node->is_op("aten::tensordot")) {
    const auto left = last_listed(node, "dims_self"), right = last_listed(node, "dims_other");
    return left && right ? std::optional(ContractedDims{{*left, *right}}) : std::nullopt;
  }
  if (contraction.kind == ContractionKind::Einsum) {
    const Arg &equation = node->arg("equation"), &tensors = node->arg("tensors");
    if (!tensors.is_list()) return ContractedDims{{-1}};
    if (!equation.is_constant()) return ContractedDims{std::vector<int64_t>(tensors.list().size(), -1)};
    return of_einsum(tensors.list(), equation.constant().toStringRef(), state);
  }
  ContractedDims found{{}, contraction.result_dim};
  for (const auto& operand : contraction.named_operands()) found.operands.push_back(operand.dim);
  return found;
}

}  // namespace plumb
