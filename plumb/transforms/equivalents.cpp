#include "plumb/transforms/equivalents.h"

#include <cmath>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/graph/operator_facts.h"
#include "plumb/graph/schema_fit.h"

namespace plumb {
namespace {

const std::unordered_map<std::string_view, Equivalent>& table() {
  static const std::unordered_map<std::string_view, Equivalent> equivalents = [] {
    std::unordered_map<std::string_view, Equivalent> t = {
        {"aten::linear", {"plumb::linear", {"weight"}, "bias"}},
        {"aten::addmm", {"plumb::linear", {"mat2"}, "self"}},
        {"aten::matmul", {"plumb::matmul", {"self", "other"}, "", true}},
        {"aten::mm", {"plumb::matmul", {"self", "mat2"}, "", true}},
        {"aten::bmm", {"plumb::matmul", {"self", "mat2"}, "", true}},
        {"aten::conv1d", {"plumb::conv1d", {"weight"}, "bias"}},
        {"aten::conv2d", {"plumb::conv2d", {"weight"}, "bias"}},
        {"aten::conv3d", {"plumb::conv3d", {"weight"}, "bias"}},
        {"aten::embedding", {"plumb::embedding", {"weight"}, ""}},
        {"aten::gelu", {"plumb::gelu", {}, ""}},
        {"aten::silu", {"plumb::silu", {}, ""}},
        {"aten::softmax", {"plumb::softmax", {}, ""}},
        {"aten::_softmax", {"plumb::softmax", {}, ""}},
        {"aten::layer_norm", {"plumb::layer_norm", {}, "", false, true}},
        {"aten::rms_norm", {"plumb::rms_norm", {}, "", false, true}},
        {"aten::scaled_dot_product_attention", {"plumb::scaled_dot_product_attention", {}, ""}},
        {"aten::dropout", {"plumb::dropout", {}, ""}},
        {"aten::cross_entropy_loss", {"plumb::cross_entropy", {}, ""}},
        {"aten::mse_loss", {"plumb::mse_loss", {}, ""}},
        {"aten::relu", {"plumb::relu", {}, ""}},
        {"aten::tanh", {"plumb::tanh", {}, ""}},
        {"aten::sigmoid", {"plumb::sigmoid", {}, ""}},
        {"aten::avg_pool1d", {"plumb::avg_pool1d", {}, ""}},
        {"aten::avg_pool2d", {"plumb::avg_pool2d", {}, ""}},
        {"aten::avg_pool3d", {"plumb::avg_pool3d", {}, ""}},
        {"aten::max_pool1d", {"plumb::max_pool1d", {}, ""}},
        {"aten::max_pool2d", {"plumb::max_pool2d", {}, ""}},
        {"aten::max_pool3d", {"plumb::max_pool3d", {}, ""}},
        {"aten::conv_transpose1d", {"plumb::conv_transpose1d", {"weight"}, "bias"}},
        {"aten::conv_transpose2d", {"plumb::conv_transpose2d", {"weight"}, "bias"}},
        {"aten::conv_transpose3d", {"plumb::conv_transpose3d", {"weight"}, "bias"}},
        {"aten::group_norm", {"plumb::group_norm", {}, "", false, true}},
        {"aten::batch_norm", {"plumb::batch_norm", {}, "", false, true}},
    };
    for (const OperatorFacts* facts : operator_table()) {
      if (facts->recurrent != RecurrentLayer::None)
        t.emplace(facts->name, Equivalent{facts->name, {}, "", false, false, true});
    }
    // Only what is built into this library.
    std::erase_if(t, [](const auto& item) { return !item.second.recurrent && !try_find_operator(item.second.to); });
    return t;
  }();
  return equivalents;
}

const c10::IValue* constant(const Node* node, std::string_view name) {
  const Arg* arg = node->try_arg(name);
  return arg && arg->is_constant() ? &arg->constant() : nullptr;
}

double as_double(const c10::IValue& v) { return v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble(); }

bool is_one(const Node* node, std::string_view name) {
  const auto* v = constant(node, name);
  return v && (v->isInt() || v->isDouble()) && as_double(*v) == 1.0;
}

// Head size of an attention's query, 0 if it is not known.
int64_t head_size(const Node* node) {
  const Value* query = node->arg("query").value();
  return query && query->meta() && !query->meta()->sizes.empty() ? query->meta()->sizes.back() : 0;
}

Arg transposed(Graph& graph, const Arg& arg, const Node* near) {
  // addmm's matrix is (in, out), a linear's weight (out, in): usually it is a transposed one already.
  Value* value = arg.value();
  if (value->producer()->is_op("aten::t")) return value->producer()->args()[0];
  Node* t = graph.call("aten::t", {value});
  t->meta() = near->meta();
  if (auto meta = value->meta(); meta && meta->sizes.size() == 2 && meta->strides.size() == 2) {
    std::swap(meta->sizes[0], meta->sizes[1]);
    std::swap(meta->strides[0], meta->strides[1]);
    if (meta->symbols.size() == 2) std::swap(meta->symbols[0], meta->symbols[1]);
    t->result()->set_meta(std::move(meta));
  }
  return t->result();
}

}  // namespace

const Equivalent* find_equivalent(const Node* node) {
  if (!node->is_call()) return nullptr;
  auto it = table().find(node->op_name());
  return it == table().end() ? nullptr : &it->second;
}

const Equivalent* find_unit_scaled(const Node* node) {
  static const std::unordered_map<std::string_view, Equivalent> weighty = {
      {"plumb::linear", {"plumb::linear", {"weight"}, "bias"}},
      {"plumb::linear_readout", {"plumb::linear_readout", {"weight"}, "bias"}},
      {"plumb::conv1d", {"plumb::conv1d", {"weight"}, "bias"}},
      {"plumb::conv2d", {"plumb::conv2d", {"weight"}, "bias"}},
      {"plumb::conv3d", {"plumb::conv3d", {"weight"}, "bias"}},
      {"plumb::conv_transpose1d", {"plumb::conv_transpose1d", {"weight"}, "bias"}},
      {"plumb::conv_transpose2d", {"plumb::conv_transpose2d", {"weight"}, "bias"}},
      {"plumb::conv_transpose3d", {"plumb::conv_transpose3d", {"weight"}, "bias"}},
      {"plumb::embedding", {"plumb::embedding", {"weight"}, ""}},
      {"plumb::matmul", {"plumb::matmul", {"left", "right"}, "", true}},
  };
  if (!node->is_call()) return nullptr;
  auto it = weighty.find(node->op_name());
  return it == weighty.end() ? nullptr : &it->second;
}

std::optional<std::string> why_not(const Node* node) {
  const std::string_view name = node->op_name();
  if (node->target().ends_with(".out") || node->target().ends_with("_out")) return "it writes into a given tensor";
  if (node->target() == "aten::softmax.Dimname") return "it names its dimension";
  if (name == "aten::addmm") {
    if (!is_one(node, "alpha") || !is_one(node, "beta")) return "its alpha or beta is not 1";
    if (!node->arg("mat2").is_value() || !node->arg("self").is_value()) return "an operand is a number";
    if (const Value* bias = node->arg("self").value(); bias->meta() && bias->meta()->sizes.size() != 1)
      return "what it adds is no bias vector";
  }
  if (name == "aten::scaled_dot_product_attention" && !node->arg("scale").is_none() &&
      (!constant(node, "scale") || head_size(node) == 0))
    return "it has a scale of its own, and the head size is not known";
  if (name == "aten::_softmax") {
    if (const auto* half = constant(node, "half_to_float"); !half || half->toBool()) return "it converts half to float";
  }
  if (const Arg* divisor = node->try_arg("divisor_override"); divisor && !divisor->is_none())
    return "it has a divisor of its own";
  for (const Arg& arg : node->args()) {
    if (!arg.is_constant() || !arg.constant().isTensor()) continue;
    return "an operand is a constant";
  }
  return std::nullopt;
}

Node* build_same_arguments(Graph& graph, const Node* node, std::string_view to) {
  const auto op = find_operator(to);
  const auto& have = node->schema().arguments();
  const auto& want = op.schema().arguments();
  std::vector<Arg> args;
  for (size_t i = 0; i < want.size(); ++i) {
    // By name where both know it, else by position among the positional ones.
    const Arg* found = node->try_arg(want[i].name());
    if (!found && i < have.size() && !have[i].kwarg_only() && !want[i].kwarg_only()) found = &node->args()[i];
    if (found) {
      args.push_back(*found);
    } else {
      args.push_back(default_argument(op.schema(), i));
    }
  }
  for (size_t i = 0; i < have.size(); ++i) {
    const bool taken = i < want.size() && !have[i].kwarg_only() && !want[i].kwarg_only();
    bool named = false;
    for (const auto& w : want) named = named || w.name() == have[i].name();
    if (taken || named) continue;
    if (has_default(node->schema(), i) && node->args()[i] == default_argument(node->schema(), i)) continue;
    throw Error(
        ErrorKind::Unsupported,
        node->describe() + " cannot become " + std::string(to) + ", which has no argument '" + have[i].name() + "'",
        node->meta().where(), "give a replacement that takes the same arguments: " + toString(op.schema()));
  }
  std::vector<int32_t> lists;
  for (int32_t n : node->result_layout()) {
    if (n >= 0) lists.push_back(n);
  }
  return graph.call(op, std::move(args), std::move(lists));
}

Node* build_equivalent(Graph& graph, const Node* node, const Equivalent& equivalent) {
  const std::string_view name = node->op_name();
  std::vector<Arg> args(node->args().begin(), node->args().end());
  std::string to(equivalent.to);
  if (name == "aten::addmm") {
    return graph.call(to, {node->arg("mat1"), transposed(graph, node->arg("mat2"), node), node->arg("self")});
  }
  if (name == "aten::_softmax") return graph.call(to, {node->args()[0], node->args()[1]});
  if (name == "aten::scaled_dot_product_attention" && !node->arg("scale").is_none()) {
    // torch's own logits have the scale 1 / sqrt(size) by default, unit-scaled ones mult / size: a scale that differs
    // from the default differs by the same factor afterwards.
    const double mult = as_double(*constant(node, "scale")) * std::sqrt(static_cast<double>(head_size(node)));
    Node* call = graph.call(to, std::move(args));
    call->set_arg("scale", std::nullopt);
    call->set_arg("mult", std::abs(mult - 1) < 1e-9 ? 1.0 : mult);
    return call;
  }
  if (node->target().ends_with(".padding")) to += ".padding";
  return build_same_arguments(graph, node, to);
}

}  // namespace plumb
