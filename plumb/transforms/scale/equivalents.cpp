#include "plumb/transforms/scale/equivalents.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <ranges>
#include <set>

#include "plumb/core/error.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/rules.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

struct Row {
  std::string_view of;  // torch's operator; "" for one that replaces none, or that names its arguments otherwise
  Equivalent equivalent;
};

const std::vector<Row>& rows() {
  using enum ScaledBy;
  static const std::vector<Row> table = {
      {"aten::linear", {"plumb::linear", Linear, {"weight"}, "bias"}},
      {"aten::addmm", {"plumb::linear", Linear, {"mat2"}, "self"}},
      {"", {"plumb::linear_readout", Linear, {"weight"}, "bias"}},
      {"", {"plumb::matmul", Matmul, {"left", "right"}, "", true}},
      {"aten::matmul", {"plumb::matmul", Matmul, {"self", "other"}, "", true}},
      {"aten::mm", {"plumb::matmul", Matmul, {"self", "mat2"}, "", true}},
      {"aten::bmm", {"plumb::matmul", Matmul, {"self", "mat2"}, "", true}},
      {"aten::conv1d", {"plumb::conv1d", Window, {"weight"}, "bias"}},
      {"aten::conv2d", {"plumb::conv2d", Window, {"weight"}, "bias"}},
      {"aten::conv3d", {"plumb::conv3d", Window, {"weight"}, "bias"}},
      {"aten::conv_transpose1d", {"plumb::conv_transpose1d", Window, {"weight"}, "bias"}},
      {"aten::conv_transpose2d", {"plumb::conv_transpose2d", Window, {"weight"}, "bias"}},
      {"aten::conv_transpose3d", {"plumb::conv_transpose3d", Window, {"weight"}, "bias"}},
      {"aten::avg_pool1d", {"plumb::avg_pool1d", Window}},
      {"aten::avg_pool2d", {"plumb::avg_pool2d", Window}},
      {"aten::avg_pool3d", {"plumb::avg_pool3d", Window}},
      {"aten::max_pool1d", {"plumb::max_pool1d", Window}},
      {"aten::max_pool2d", {"plumb::max_pool2d", Window}},
      {"aten::max_pool3d", {"plumb::max_pool3d", Window}},
      {"aten::embedding", {"plumb::embedding", None, {"weight"}}},
      {"", {"plumb::silu_glu", Gate}},
      {"aten::softmax", {"plumb::softmax", Softmax}},
      {"aten::_softmax", {"plumb::softmax", Softmax}},
      {"aten::relu", {"plumb::relu", Relu}},
      {"aten::dropout", {"plumb::dropout"}},
      {"aten::layer_norm", {"plumb::layer_norm"}},
      {"aten::rms_norm", {"plumb::rms_norm"}},
      {"aten::group_norm", {"plumb::group_norm"}},
      {"aten::batch_norm", {"plumb::batch_norm"}},
      {"aten::scaled_dot_product_attention", {"plumb::scaled_dot_product_attention", Attention}},
      {"aten::cross_entropy_loss", {"plumb::cross_entropy", Loss}},
      {"aten::mse_loss", {"plumb::mse_loss"}},
      {"", {"plumb::add", Add}},  // which adds become which, unit_scale.cpp decides
      {"", {"plumb::residual_add", Add}},
      {"", {"plumb::residual_split", Factor}},
      {"", {"plumb::scale_fwd", Factor}},
      {"", {"plumb::scale_bwd", Factor}},
      {"", {"plumb::rescale", Factor}},
  };
  return table;
}

struct Tables {
  std::map<std::string, Equivalent, std::less<>> of_torch, scaled;
};

const Tables& tables() {
  static const Tables made = [] {
    Tables t;
    for (const Row& row : rows()) {
      if (!row.of.empty()) t.of_torch.emplace(row.of, row.equivalent);
      t.scaled.emplace(row.equivalent.to, row.equivalent);
    }
    for (const ElementwiseFunction& function : elementwise_functions()) {
      const std::string name(function.name);
      const auto& entry = *t.scaled.emplace("plumb::" + name, Equivalent{"", ScaledBy::Elementwise}).first;
      t.of_torch.emplace("aten::" + name, Equivalent{entry.first, ScaledBy::Elementwise});
    }
    for (const OperatorFacts* facts : operator_table()) {
      if (facts->recurrent != RecurrentLayer::None)
        t.of_torch.emplace(facts->name, Equivalent{.to = facts->name, .recurrent = true});
      if (!facts->groups.empty())
        t.of_torch.emplace(
            facts->name,
            Equivalent{.to = facts->name, .weights = {facts->contraction.operands[1].argument}, .experts = true});
    }
    return t;
  }();
  return made;
}

const Equivalent* find_in(const std::map<std::string, Equivalent, std::less<>>& table, const Node* node) {
  if (!node->is_call()) return nullptr;
  auto it = table.find(node->op_name());
  return it == table.end() ? nullptr : &it->second;
}

bool is_one(const Node* node, std::string_view name) { return number_of(node->arg(name)) == 1.0; }

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

// Returns whether a value may be a target: an input, or what has no gradient.
bool may_be_target(const Value* value, const NodeSet& differentiable) {
  while (true) {
    const Node* node = value->producer();
    if (node->kind() == NodeKind::Placeholder || !differentiable.contains(node)) return true;
    if (node->is_op("aten::broadcast_tensors")) {  // torch.nn.functional's losses begin with it
      const auto results = node->results();
      value = node->input(static_cast<size_t>(std::ranges::find(results, value) - results.begin()));
    } else if (is_passthrough(node) && node->args()[0].is_value()) {
      value = node->input(0);
    } else {
      return false;
    }
  }
}

// Returns a node that reads a probability or a cosine by its range, with views, picked entries, powers, and numbers or
// tensors without a gradient between them; null if there is none. One minus a probability is the other outcome's, and
// what is rounded is a level or a count. `is_sigmoid`: the graph's output counts as such a reader, and so does a
// product, of which a gate lets a share through: a state that goes through one step by step would grow with every step.
const Node* reader_of_range(const Value* value, bool is_sigmoid, const NodeSet& differentiable) {
  static const std::set<std::string_view> readers = {"aten::binary_cross_entropy",
                                                     "aten::bernoulli",
                                                     "aten::bernoulli_",
                                                     "aten::clamp",
                                                     "aten::clip",
                                                     "aten::ceil",
                                                     "aten::floor",
                                                     "aten::round",
                                                     "aten::logit",
                                                     "aten::log1p",
                                                     "aten::acos",
                                                     "aten::asin",
                                                     "aten::atanh",
                                                     "aten::rsub"};
  // With a target.
  static const std::set<std::string_view> losses = {"aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss",
                                                    "aten::huber_loss"};
  // With a number that is not zero: a probability less one, or whether it is above a half.
  static const std::set<std::string_view> against = {"aten::sub", "aten::gt", "aten::ge", "aten::lt", "aten::le"};
  static const std::set<std::string_view> maps = {"aten::mul",    "aten::div", "aten::add",    "aten::sub",
                                                  "aten::neg",    "aten::pow", "aten::square", "aten::sum",
                                                  "aten::cumsum", "aten::flip"},
                                          picks = {"aten::gather", "aten::index", "aten::index_select"},
                                          gated = {"aten::mul", "aten::lerp", "aten::addcmul"};
  std::vector<Use> open;  // the next one last; a chain may be longer than the stack is deep
  const auto carries = [&](const Value* input) { return differentiable.contains(input->producer()); };
  const auto follow = [&](const Value* next) { open.insert(open.end(), next->uses().rbegin(), next->uses().rend()); };
  for (follow(value); !open.empty();) {
    const Use use = open.back();
    open.pop_back();
    if (is_sigmoid && use.user->kind() == NodeKind::Output) return use.user;
    if (!use.user->is_call()) continue;
    if (readers.count(use.user->op_name())) return use.user;
    if (losses.count(use.user->op_name()) && use.user->num_inputs() == 2 &&
        may_be_target(use.user->input(1 - use.index), differentiable))
      return use.user;
    if (against.count(use.user->op_name()) && number_of(use.user->arg("other")).value_or(0) != 0) return use.user;
    if (is_sigmoid && gated.count(use.user->op_name()) && use.user->inputs().size() > 1) return use.user;
    const bool mapped = maps.count(use.user->op_name()) && std::ranges::count_if(use.user->inputs(), carries) == 1;
    const bool picked = use.index == 0 && picks.count(use.user->op_name());
    if (!mapped && !picked && !is_passthrough(use.user) && !use.user->result_aliases_input()) continue;
    for (const Value* result : use.user->results() | std::views::reverse) follow(result);
  }
  return nullptr;
}

// Returns whether a value is a relu's result, perhaps pooled or rearranged: no element is negative.
bool has_passed_a_relu(const Value* value) {
  static const std::set<std::string_view> keep = {"aten::max_pool1d", "aten::max_pool2d", "aten::max_pool3d",
                                                  "aten::dropout"};
  const Node* node = value->producer();
  while (is_passthrough(node) || (node->is_call() && keep.count(node->op_name()))) node = node->input(0)->producer();
  return node->is_op("aten::relu");
}

// Returns whether a node adds something to what a relu let through, as residual layers do that end with a relu. The
// next relu lets nearly all of it through again.
bool adds_to_a_relu(const Node* node) {
  return (node->is_op("aten::add") || node->is_op("aten::add_")) &&
         std::ranges::any_of(node->inputs(), has_passed_a_relu);
}

}  // namespace

std::optional<std::vector<int64_t>> sizes_of_argument(const Node* node, std::string_view name) {
  const Value* value = node->arg(name).value();
  return value && value->meta() ? std::optional(value->meta()->sizes) : std::nullopt;
}

const Equivalent* find_equivalent(const Node* node) { return find_in(tables().of_torch, node); }

const Equivalent* find_unit_scaled(const Node* node) { return find_in(tables().scaled, node); }

std::optional<std::string> why_not(const Node* node, const NodeSet& differentiable) {
  const std::string_view name = node->op_name();
  if (node->target().ends_with(".out") || node->target().ends_with("_out")) return "it writes into a given tensor";
  if (node->target() == "aten::softmax.Dimname") return "it names its dimension";
  if (name == "aten::linear") {
    const auto weight = sizes_of_argument(node, "weight"), bias = sizes_of_argument(node, "bias");
    if (weight && weight->size() != 2) return "its weight is a vector, and the unit-scaled one takes a matrix";
    if (bias && (bias->size() != 1 || (weight && bias->front() != weight->front())))
      return "what it adds is no bias vector";
  }
  if (name == "aten::addmm") {
    if (!is_one(node, "alpha") || !is_one(node, "beta")) return "its alpha or beta is not 1";
    if (!node->arg("mat2").is_value() || !node->arg("self").is_value()) return "an operand is a number";
    const auto right = sizes_of_argument(node, "mat2"), bias = sizes_of_argument(node, "self");
    if (bias && (bias->size() != 1 || (right && right->size() == 2 && bias->front() != right->back())))
      return "what it adds is no bias vector";
  }
  if (name == "aten::scaled_dot_product_attention" && !node->arg("scale").is_none() &&
      (!number_of(node->arg("scale")) || head_size(node) == 0))
    return "it has a scale of its own, and the head size is not known";
  if (name == "aten::_softmax") {
    if (const Arg& half = node->arg("half_to_float"); !half.is_constant() || half.constant().toBool())
      return "it converts half to float";
  }
  if (const Arg* divisor = node->try_arg("divisor_override"); divisor && !divisor->is_none())
    return "it has a divisor of its own";
  if (name == "aten::relu" && adds_to_a_relu(node->input(0)->producer()))
    return "its input adds to what a relu let through, nearly all of which passes again: values would grow with each "
           "layer";
  if (name == "aten::sigmoid" || name == "aten::tanh" || name == "aten::softmax" || name == "aten::_softmax") {
    // A model that returns a sigmoid returns a probability, a place in a picture and the like, which its loss takes as
    // such.
    const Node* reader = reader_of_range(node->result(), name == "aten::sigmoid", differentiable);
    if (reader != nullptr)
      return reader->is_call() ? std::string(reader->op_name()) + " reads it by its range" : "the model returns it";
  }
  for (const Arg& arg : node->args()) {
    if (arg.is_constant() && arg.constant().isTensor()) return "an operand is a constant";
    const auto* type = arg.is_value() && arg.value()->meta() ? &*arg.value()->meta() : nullptr;
    if (type && type->strides.size() != type->sizes.size()) return "an operand is sparse";
  }
  return std::nullopt;
}

std::vector<Arg> arguments_for(const c10::OperatorHandle& op, const Node* node) {
  const auto& have = node->schema().arguments();
  const auto& want = op.schema().arguments();
  std::vector<Arg> args;
  for (size_t i = 0; i < want.size(); ++i) {
    const Arg* found = node->try_arg(want[i].name());
    if (!found && i < have.size() && !have[i].kwarg_only() && !want[i].kwarg_only()) found = &node->args()[i];
    args.push_back(found ? *found : default_argument(op.schema(), i));
  }
  return args;
}

Node* build_same_arguments(Graph& graph, const Node* node, std::string_view to) {
  const auto op = find_operator(to);
  const auto& have = node->schema().arguments();
  const auto& want = op.schema().arguments();
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
  return graph.call(op, arguments_for(op, node), std::move(lists));
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
    const double mult = *number_of(node->arg("scale")) * std::sqrt(static_cast<double>(head_size(node)));
    Node* call = graph.call(to, std::move(args));
    call->set_arg("scale", std::nullopt);
    call->set_arg("mult", std::abs(mult - 1) < 1e-9 ? 1.0 : mult);
    return call;
  }
  if (node->target().ends_with(".padding")) to += ".padding";
  return build_same_arguments(graph, node, to);
}

}  // namespace plumb
