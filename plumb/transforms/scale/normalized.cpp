#include "plumb/transforms/scale/normalized.h"

#include <algorithm>

#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

constexpr const char *kLength = "an operand has length 1: its result has the scale of the other, or is a cosine",
                     *kShares = "an operand sums to 1: its result is a mean of the other";

// Returns the sum of `x`, the sum of its squares, or the root of that, that a value is but for a small number against
// division by zero. Null: it is none. `squared`: it is the sum of squares.
const Value* sum_of(const Value* value, const Value* x, bool squared) {
  while (true) {
    value = before_passthrough(value);
    const Node* node = value->producer();
    if (!node->is_call() || node->num_inputs() == 0) return nullptr;
    if (squared && node->is_op("aten::sum")) {
      const Node* square = before_passthrough(node->input(0))->producer();
      const bool power = square->is_op("aten::pow") && number_of(square->args()[1]) == 2.0;
      const bool product = square->is_op("aten::mul") && square->num_inputs() == 2;
      const auto operands = square->inputs();
      const bool same = std::ranges::all_of(operands, [&](const Value* v) { return before_passthrough(v) == x; });
      return (power || product) && same ? value : nullptr;
    }
    if (!squared && node->is_op("aten::sum")) return before_passthrough(node->input(0)) == x ? value : nullptr;
    if (!squared && (node->is_op("aten::linalg_vector_norm") || node->is_op("aten::norm"))) {
      const Arg* order = node->try_arg(node->is_op("aten::norm") ? "p" : "ord");
      const bool euclidean = !order || number_of(*order).value_or(2) == 2;
      return before_passthrough(node->input(0)) == x && euclidean ? value : nullptr;
    }
    if (!squared && node->is_op("aten::sqrt")) {
      squared = true;
    } else if (node->num_inputs() != 1 ||
               (!node->is_op("aten::add") && !node->is_op("aten::clamp_min") && !node->is_op("aten::clamp"))) {
      return nullptr;
    }
    value = node->input(0);
  }
}

// Returns why a value has a known length or sum over so many elements; null if it has not.
const char* normalized_over(const Value* value, int64_t count) {
  const Node* node = before_passthrough(value)->producer();
  const bool divides = node->is_op("aten::div");
  if ((!divides && !node->is_op("aten::mul")) || node->num_inputs() != 2) return nullptr;
  for (const size_t i : {1, 0}) {
    if (divides && i == 0) break;
    const Value *x = before_passthrough(node->input(1 - i)), *by = before_passthrough(node->input(i));
    if (!divides && !by->producer()->is_op("aten::rsqrt")) continue;
    const Value* sum = sum_of(divides ? by : by->producer()->input(0), x, !divides);
    if (sum && sum->meta() && x->meta() && sum->meta()->numel() > 0 &&
        x->meta()->numel() / sum->meta()->numel() == count)
      return sum->producer()->is_op("aten::sum") && before_passthrough(sum->producer()->input(0)) == x ? kShares
                                                                                                       : kLength;
  }
  return nullptr;
}

// Returns how many elements of this operand one of the result sums over; 0 if that is not known.
int64_t summed_elements(const Node* product, const ContractedOperand& operand) {
  const Arg* arg = product->try_arg(operand.argument);
  if (!arg || !arg->is_value() || !arg->value()->meta()) return 0;
  const auto& sizes = arg->value()->meta()->sizes;
  if (product->facts().contraction.kind == ContractionKind::Convolution)
    return operand.argument == "weight" && !sizes.empty() && sizes[0] > 0 ? element_count(sizes) / sizes[0] : 0;
  const auto dim = static_cast<int64_t>(sizes.size()) + operand.dim;
  return dim >= 0 && dim < static_cast<int64_t>(sizes.size()) ? sizes[static_cast<size_t>(dim)] : 0;
}

}  // namespace

std::optional<NormalizedOperand> normalized_operand(const Node* product) {
  const Contraction& contraction = product->facts().contraction;
  if (contraction.kind != ContractionKind::Product && contraction.kind != ContractionKind::Convolution) return {};
  const auto operands = contraction.named_operands();
  if (std::ranges::any_of(operands, [&](const ContractedOperand& operand) {
        const Arg* arg = product->try_arg(operand.argument);
        return arg && arg->is_value() && source_attribute(arg->value());
      }))
    return {};
  for (const ContractedOperand& operand : operands) {
    const int64_t count = summed_elements(product, operand);
    if (count <= 1) continue;
    Value* const value = product->arg(operand.argument).value();
    const char* const why = normalized_over(value, count);
    if (!why) continue;
    const auto inputs = product->inputs();
    const auto other = std::ranges::find_if(inputs, [&](const Value* input) { return input != value; });
    return NormalizedOperand{why, why == kShares && other != inputs.end() ? *other : nullptr};
  }
  return {};
}

}  // namespace plumb
