#include "plumb/transforms/scale/attention.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

// Returns whether a node takes the largest of some values.
bool chooses(const Node* node) {
  static const std::set<std::string_view> names = {"aten::topk", "aten::sort", "aten::argmax", "aten::argsort"};
  return node->is_call() && (names.count(node->op_name()) || node->target() == "aten::max.dim");
}

// Returns whether a node takes single entries of the last dimension, as a gate does that weighs each expert on its own.
bool takes_one(const Node* node) {
  static const std::set<std::string_view> whole = {"aten::select", "aten::unbind"},
                                          parts = {"aten::slice", "aten::split", "aten::chunk"};
  const std::string_view name = node->is_call() ? node->op_name() : "";
  if (!whole.count(name) && !parts.count(name)) return false;
  const auto& before = node->input(0)->meta();
  const Arg* given = node->try_arg("dim");
  if (!before || before->sizes.empty() || !given) return false;
  const auto dim = number_of(*given);
  if (dim != -1.0 && dim != double(before->sizes.size() - 1)) return false;
  const auto& after = node->num_results() ? node->result(0)->meta() : before;
  if (whole.count(name)) return true;
  return before->sizes.back() != 1 && after && !after->sizes.empty() && after->sizes.back() == 1;
}

constexpr int kNear = 6;  // steps of masks, biases and views between a softmax and a choice

bool is_chosen(const Value* value, int steps = kNear) {
  static const std::set<std::string_view> through = {"aten::masked_fill", "aten::where", "aten::gather"};
  const Node* node = value->producer();
  if (chooses(node)) return true;
  if (!steps || !node->is_call() || (!is_passthrough(node) && !through.count(node->op_name()))) return false;
  const auto inputs = node->inputs();
  return std::any_of(inputs.begin(), inputs.end(), [&](const Value* input) { return is_chosen(input, steps - 1); });
}

bool is_chosen_from(const Value* value, int steps = kNear) {
  static const std::set<std::string_view> through = {"aten::add", "aten::mul", "aten::div", "aten::masked_fill"};
  return std::any_of(value->uses().begin(), value->uses().end(), [&](const Use& use) {
    const Node* user = use.user;
    if (chooses(user) || takes_one(user)) return true;
    if (!steps || !user->is_call() || (!is_passthrough(user) && !through.count(user->op_name()))) return false;
    const auto& results = user->results();
    return std::any_of(results.begin(), results.end(),
                       [&](const Value* result) { return is_chosen_from(result, steps - 1); });
  });
}

bool is_softmax(const Node* node) {
  const std::string_view name = node->op_name();
  return name.ends_with("::softmax") || name.ends_with("::_softmax");
}

}  // namespace

bool are_logits(const Value* value, int steps) {
  static const std::set<std::string_view> through = {"aten::add", "plumb::add",        "aten::mul",
                                                     "aten::div", "aten::masked_fill", "aten::where"};
  const auto& uses = value->uses();
  return !uses.empty() && std::all_of(uses.begin(), uses.end(), [&](const Use& use) {
    const Node* user = use.user;
    if (!user->is_call() || user->num_results() != 1) return false;
    if (looks_at_shape_only(*user) || is_softmax(user)) return true;
    return steps && (is_passthrough(user) || through.count(user->op_name())) && are_logits(user->result(), steps - 1);
  });
}

bool is_attention(const Node* node) {
  if (!node->is_call()) return false;
  const std::string_view name = node->op_name();
  if (operator_facts(name).contraction.kind == ContractionKind::Attention) return true;
  if (is_softmax(node)) return !is_chosen(node->input(0)) && !is_chosen_from(node->result());
  return name.ends_with("::_native_multi_head_attention");
}

}  // namespace plumb
