#include "plumb/transforms/rewrite.h"

#include <ATen/ops/amin.h>

#include <algorithm>
#include <span>

#include "plumb/core/join.h"
#include "plumb/core/text.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/formats/format_recipe.h"

namespace plumb {
namespace {

constexpr double kBlocking = -1e4;  // added to a logit, no weight is left: exp(-1e4) is 0 in every type

bool is_identity(const Node* node) {
  if (!node->is_op("aten::to") && !node->is_op("aten::type_as")) return false;
  auto is_off = [&](std::string_view name) {
    const Arg* arg = node->try_arg(name);
    return !arg || arg->is_none() || (arg->is_constant() && arg->constant().isBool() && !arg->constant().toBool());
  };
  return is_off("copy") && is_off("memory_format") && keeps_type(node);
}

}  // namespace

Node* insert_call(Graph& graph, Node* before, std::string_view op, std::vector<Arg> args, const Node* node,
                  const Value* like) {
  auto here = graph.inserting_before(before);
  Node* made = graph.call(op, std::move(args));
  made->meta() = node->meta();
  made->result()->set_meta(like->meta());
  return made;
}

bool keeps_type(const Node* node) {
  const auto &before = node->input(0)->meta(), &after = node->result()->meta();
  return before && after && before->dtype == after->dtype && before->device == after->device &&
         before->strides == after->strides;
}

bool erase_identities(Graph& graph) {
  bool changed = false;
  for (Node* node : graph.nodes()) {
    if (!is_identity(node)) continue;
    graph.replace_all_uses_with(node->result(), node->input(0));
    graph.erase(node);
    changed = true;
  }
  return changed;
}

std::unordered_map<const Node*, size_t> count_writes(const Graph& graph) {
  std::unordered_map<const Node*, size_t> writes;
  size_t count = 0;
  for (const Node* node : graph.nodes()) {
    const size_t own = may_write(*node) ? 1 : 0;
    count += own;
    writes[node] = count;
    count += own;
  }
  return writes;
}

std::string other_names(const std::vector<std::string>& names) {
  return names.size() < 2 ? "" : "also named " + join(std::span(names).subspan(1));
}

std::optional<double> number_of(const Arg& arg) {
  if (!arg.is_constant()) return std::nullopt;
  const auto& v = arg.constant();
  return v.isDouble() ? std::optional(v.toDouble())
         : v.isInt()  ? std::optional(static_cast<double>(v.toInt()))
                      : std::nullopt;
}

bool is_passthrough(const Node* node) {
  return node->is_call() && node->num_inputs() > 0 && node->facts().passes_through;
}

const Node* source_attribute(const Value* value) {
  while (value) {
    const Node* node = value->producer();
    if (node->kind() == NodeKind::GetAttr) return node;
    if (!is_passthrough(node) || !node->args()[0].is_value()) return nullptr;
    value = node->args()[0].value();
  }
  return nullptr;
}

const Attr* source_parameter(const Value* value, const State& state) {
  const Node* source = source_attribute(value);
  const Attr* attr = source ? state.find(source->target()) : nullptr;
  return attr && attr->kind == AttrKind::Parameter ? attr : nullptr;
}

const Value* before_passthrough(const Value* value) {
  while (is_passthrough(value->producer()) && value->producer()->args()[0].is_value())
    value = value->producer()->input(0);
  return value;
}

std::vector<Use> effective_uses(const Value* value) {
  std::vector<Use> found;
  std::vector<const Value*> open{value};
  while (!open.empty()) {
    const Value* v = open.back();
    open.pop_back();
    for (const Use& use : v->uses()) {
      if (is_passthrough(use.user)) {
        // `x.view_as(w)` and the like look at w's shape or type only.
        if (use.index != 0 || !use.user->args()[0].is_value()) continue;
        for (const Value* result : use.user->results()) open.push_back(result);
      } else {
        found.push_back(use);
      }
    }
  }
  return found;
}

namespace {

bool fits_module_or_parameter(const Node* node, const std::string& pattern) {
  if (matches_pattern(pattern, node->meta().module_path())) return true;
  return std::ranges::any_of(node->inputs(), [&](const Value* value) {
    const Node* attr = source_attribute(value);
    return attr && matches_pattern(pattern, attr->target());
  });
}

// Values are named by operators: %linear may be the product of any layer, and no user means it by the module "linear".
bool fits_value(const Node* node, const std::string& pattern) {
  const std::string& name = node->result()->name();
  if (pattern.starts_with('%')) return matches_pattern(std::string_view(pattern).substr(1), name);
  if (!matches_pattern(pattern, name)) return false;
  for (const Node* other : node->graph().nodes()) {
    if (is_product(other) && fits_module_or_parameter(other, pattern)) return false;
  }
  return true;
}

}  // namespace

const std::string* excluded_by(const Node* node, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    if (fits_module_or_parameter(node, pattern) || fits_value(node, pattern)) return &pattern;
  }
  return nullptr;
}

std::optional<at::ScalarType> dtype_of(const Value* value, const State& state) {
  if (value->meta()) return value->meta()->dtype;
  const Node* node = value->producer();
  if (node->kind() == NodeKind::GetAttr) {
    if (const Attr* attr = state.find(node->target()); attr && attr->tensor.defined())
      return attr->tensor.scalar_type();
  }
  return std::nullopt;
}

std::vector<int64_t> sizes_of(const Value* value, const State& state) {
  if (!value) return {};
  if (value->meta()) return value->meta()->sizes;
  if (value->producer()->kind() != NodeKind::GetAttr) return {};
  const Attr* attr = state.find(value->producer()->target());
  return attr && attr->tensor.defined() ? attr->tensor.sizes().vec() : std::vector<int64_t>{};
}

bool may_be_float(const Value* value, const State& state) {
  if (value->type() == ValueType::Int || value->type() == ValueType::Bool) return false;
  const auto dtype = dtype_of(value, state);
  return !dtype || at::isFloatingType(*dtype);
}

bool may_have_gradient(const Value* value, const State& state) {
  const auto dtype = dtype_of(value, state);
  return may_be_float(value, state) || (dtype && at::isComplexType(*dtype));
}

NodeSet differentiable_nodes(const Graph& graph, const State& state, bool (*stops)(const Node&)) {
  NodeSet found;
  for (const Node* node : graph.nodes()) {
    bool flows = false;
    if (node->kind() == NodeKind::Placeholder) {
      flows = node->result()->is_tensor() && may_have_gradient(node->result(), state);
    } else if (node->kind() == NodeKind::GetAttr) {
      const Attr* attr = state.find(node->target());
      flows = attr && attr->kind == AttrKind::Parameter && may_have_gradient(node->result(), state);
    } else if (!stops(*node)) {
      for (size_t i = 0; i < node->num_inputs() && !flows; ++i) {
        flows = found.contains(node->input(i)->producer()) && may_have_gradient(node->input(i), state);
      }
    }
    if (flows) found.insert(node);
  }
  return found;
}

std::unordered_map<const Node*, std::string> computed_from_parameters(const Graph& graph, const State& state) {
  std::unordered_map<const Node*, std::string> tensor_of, computed;  // the name of a tensor
  NodeSet from_input;
  for (const Node* node : graph.nodes()) {
    if (node->kind() == NodeKind::Placeholder) {
      from_input.insert(node);
      continue;
    }
    if (node->kind() == NodeKind::GetAttr) {
      const Attr* attr = state.find(node->target());
      if (attr && attr->kind != AttrKind::Constant && may_have_gradient(node->result(), state))
        tensor_of.emplace(node, node->target());
      continue;
    }
    for (const Value* value : node->inputs()) {
      if (from_input.contains(value->producer())) from_input.insert(node);
      if (auto it = tensor_of.find(value->producer()); it != tensor_of.end()) tensor_of.emplace(node, it->second);
    }
    if (from_input.contains(node)) {
      tensor_of.erase(node);
    } else if (auto it = tensor_of.find(node);
               it != tensor_of.end() && node->num_results() && !source_attribute(node->result())) {
      computed.emplace(node, it->second);
    }
  }
  return computed;
}

bool looks_like_mask(const Value* value, const State& state) {
  // A mask is made in a few steps; further away it is something else.
  for (int step = 0; step < 12; ++step) {
    const Node* node = value->producer();
    if (node->kind() == NodeKind::GetAttr) {
      const Attr* attr = state.find(node->target());
      if (!attr || attr->kind == AttrKind::Parameter || !attr->tensor.defined() || attr->tensor.is_meta() ||
          attr->tensor.numel() == 0 || !attr->tensor.is_floating_point())
        return false;
      return at::amin(attr->tensor.detach()).to(at::kDouble).item<double>() <= kBlocking;
    }
    if (!node->is_call()) return false;
    const std::string_view name = node->op_name();
    auto blocks = [&](std::string_view argument) {
      const Arg* arg = node->try_arg(argument);
      const auto n = arg ? number_of(*arg) : std::nullopt;
      return n && *n <= kBlocking;
    };
    if (name == "aten::full" || name == "aten::full_like" || name == "aten::new_full") return blocks("fill_value");
    if (name == "aten::scalar_tensor") return blocks("s");
    if (name == "aten::masked_fill" && blocks("value")) return true;
    if (name == "aten::where" && (blocks("other") || blocks("self"))) return true;
    if (name == "aten::mul" && blocks("other")) return true;
    if (name == "aten::where") {
      const Arg* other = node->try_arg("other");
      if (!other || !other->value()) return false;
      value = other->value();
    } else if (is_passthrough(node) || name == "aten::masked_fill" || name == "aten::triu" || name == "aten::tril" ||
               name == "aten::mul" || name == "aten::index" || name == "aten::index_select") {
      if (!node->args()[0].is_value()) return false;
      value = node->args()[0].value();
    } else {
      return false;
    }
  }
  return false;
}

}  // namespace plumb
