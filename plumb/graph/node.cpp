#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string_view>

#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"
#include "plumb/graph/arg.h"
#include "plumb/graph/graph.h"
#include "plumb/graph/meta.h"
#include "plumb/graph/node_kind.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

// Returns null if the operator has no such argument, or takes it from the graph.
const c10::IValue* constant_arg(const Node& node, std::string_view name) {
  const Arg* arg = node.try_arg(name);
  return arg && arg->is_constant() ? &arg->constant() : nullptr;
}

bool is_off(const c10::IValue* flag) { return flag && flag->isBool() && !flag->toBool(); }

// Gives `visit` the arguments whose memory the node writes, until it returns true. Returns whether it did.
template <typename Visit>
bool visit_written(const Node& node, Visit&& visit) {
  if (!node.is_call()) return false;
  const auto& arguments = node.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && alias->isWrite() && std::invoke(visit, node.args()[i])) return true;
  }
  const OperatorFacts& facts = node.facts();
  if (facts.writes[0].empty() || is_off(constant_arg(node, facts.writes_if))) return false;
  for (std::string_view name : facts.writes) {
    if (const Arg* arg = node.try_arg(name); arg && std::invoke(visit, *arg)) return true;
  }
  return false;
}

}  // namespace

std::string_view to_string(NodeKind kind) {
  static constexpr std::string_view kNames[] = {"placeholder", "get_attr", "call_function", "output"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<Node*> Value::users() const {
  std::vector<Node*> nodes;
  nodes.reserve(uses_.size());
  for (const Use& use : uses_) nodes.push_back(use.user);
  std::sort(nodes.begin(), nodes.end(), [](const Node* a, const Node* b) { return a != b && a->is_before(b); });
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  return nodes;
}

std::string Node::describe() const {
  std::string text = "node";
  if (!results_.empty()) text += " %" + results_[0]->name();
  switch (kind_) {
    case NodeKind::Placeholder: return text + " (input '" + target_ + "')";
    case NodeKind::GetAttr: return text + " (get_attr '" + target_ + "')";
    case NodeKind::Output: return "the output node";
    default: return text + " (" + target_ + ")";
  }
}

Node::Node(Graph* graph, NodeKind kind) : graph_(graph), id_(graph->id_end_++), kind_(kind) {
  static const OperatorFacts& nothing = operator_facts("");
  facts_ = &nothing;
}

const c10::OperatorHandle& Node::op() const {
  if (!op_) throw Error(ErrorKind::InvalidArgument, describe() + " is not an operator call");
  return *op_;
}

std::string_view Node::op_name() const {
  std::string_view name = target_;
  if (kind_ != NodeKind::CallFunction) return name;
  return name.substr(0, name.find('.'));
}

bool Node::is_op(std::string_view name) const {
  if (kind_ != NodeKind::CallFunction) return false;
  return target_ == name || op_name() == name;
}

const Arg& Node::arg(size_t i) const {
  if (i >= args_.size()) {
    throw Error(ErrorKind::InvalidArgument,
                describe() + " has " + std::to_string(args_.size()) + " arguments, not " + std::to_string(i + 1),
                meta_.where());
  }
  return args_[i];
}

const Arg* Node::try_arg(std::string_view schema_name) const {
  if (!op_) return nullptr;
  const auto& arguments = op_->schema().arguments();
  for (size_t i = 0; i < arguments.size() && i < args_.size(); ++i) {
    if (arguments[i].name() == schema_name) return &args_[i];
  }
  return nullptr;
}

const Arg& Node::arg(std::string_view schema_name) const {
  if (const Arg* found = try_arg(schema_name)) return *found;
  throw Error(ErrorKind::UnknownName, describe() + " has no argument '" + std::string(schema_name) + "'",
              meta_.where());
}

void Node::set_arg(size_t i, Arg arg) {
  this->arg(i);  // bounds
  if (op_) arg = fit_argument(op_->schema(), i, std::move(arg));
  detach_inputs();
  args_[i] = std::move(arg);
  attach_inputs();
  ++graph_->version_;
}

void Node::set_arg(std::string_view schema_name, Arg arg) {
  const Arg& slot = this->arg(schema_name);
  set_arg(static_cast<size_t>(&slot - args_.data()), std::move(arg));
}

std::vector<Value*> Node::inputs() const {
  std::vector<Value*> values;
  values.reserve(inputs_.size());
  for (const Input& in : inputs_) values.push_back(in.value);
  return values;
}

Value* Node::input(size_t i) const {
  if (i < inputs_.size()) return inputs_[i].value;
  throw Error(ErrorKind::InvalidArgument,
              describe() + " has " + std::to_string(inputs_.size()) + " inputs, not " + std::to_string(i + 1),
              meta_.where(), "give it tensors in the place of numbers or None");
}

void Node::set_input(size_t i, Value* value) {
  input(i);  // throws if there is none
  if (value == nullptr)
    throw Error(ErrorKind::InvalidArgument, "input " + std::to_string(i) + " of " + describe() + " is a null pointer");
  remove_use(i);
  Input& in = inputs_[i];
  in.value = value;
  in.slot->data_ = value;
  in.use_index = static_cast<uint32_t>(value->uses_.size());
  value->uses_.push_back({this, static_cast<uint32_t>(i)});
  ++graph_->version_;
}

Value* Node::result(size_t i) const {
  if (i >= results_.size()) {
    throw Error(ErrorKind::InvalidArgument,
                describe() + " has " + std::to_string(results_.size()) + " results, not " + std::to_string(i + 1),
                meta_.where());
  }
  return results_[i].get();
}

std::vector<Value*> Node::results() const {
  std::vector<Value*> values;
  values.reserve(results_.size());
  for (const auto& v : results_) values.push_back(v.get());
  return values;
}

NodeMeta& Node::meta() {
  ++graph_->version_;  // grad_enabled changes what running means
  return meta_;
}

bool Node::is_before(const Node* other) const { return position_ < other->position_; }

void Node::attach_inputs() {
  // Nested argument lists are as deep as schemas nest lists: two levels at most, so recursion is bounded.
  auto attach = [this](auto&& self, Arg& arg) -> void {
    if (arg.is_value()) {
      Value* value = arg.value();
      inputs_.push_back({value, &arg, static_cast<uint32_t>(value->uses_.size())});
      value->uses_.push_back({this, static_cast<uint32_t>(inputs_.size() - 1)});
    } else if (arg.is_list()) {
      for (Arg& e : std::get<Arg::List>(arg.data_)) self(self, e);
    }
  };
  for (Arg& arg : args_) attach(attach, arg);
}

void Node::remove_use(size_t input) {
  const Input& in = inputs_[input];
  auto& uses = in.value->uses_;
  const uint32_t at = in.use_index;
  if (at + 1 != uses.size()) {
    uses[at] = uses.back();
    uses[at].user->inputs_[uses[at].index].use_index = at;
  }
  uses.pop_back();
}

void Node::detach_inputs() {
  for (size_t i = inputs_.size(); i-- > 0;) remove_use(i);
  inputs_.clear();
}

std::vector<Value*> Node::written_inputs() const {
  std::vector<Value*> written;
  visit_written(*this, [&](const Arg& arg) {
    collect_values(arg, written);
    return false;
  });
  return written;
}

bool Node::writes() const { return visit_written(*this, &Arg::has_values); }

bool Node::result_aliases_input() const {
  if (!op_) return false;
  if (facts_->may_alias || facts_->opaque) return true;
  for (const auto& r : op_->schema().returns()) {
    if (r.alias_info()) return true;
  }
  return false;
}

bool Node::is_random() const {
  if (!op_) return false;
  if (!op_->hasTag(at::Tag::nondeterministic_seeded)) return false;
  if (is_off(constant_arg(*this, facts_->draws_if))) return false;
  const c10::IValue* p = constant_arg(*this, facts_->draws_with);
  return !(p && ((p->isDouble() && p->toDouble() == 0) || (p->isInt() && p->toInt() == 0)));
}

bool Node::has_side_effects() const {
  if (kind_ == NodeKind::Output || kind_ == NodeKind::Placeholder) return true;
  if (kind_ == NodeKind::GetAttr) return false;
  if (op_->schema().returns().empty()) return true;
  return facts_->opaque || facts_->has_effects || writes() || is_random();
}

namespace {

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b) || (a != a && b != b);
}

}  // namespace

bool Arg::has_values() const { return is_value() || (is_list() && std::ranges::any_of(list(), &Arg::has_values)); }

bool operator==(const Arg& a, const Arg& b) {
  if (a.data_.index() != b.data_.index()) return false;
  if (a.is_value()) return a.value() == b.value();
  if (a.is_list()) return a.list() == b.list();
  return same_constant(a.constant(), b.constant());
}

bool same_constant(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble()) return same_bits(a.toDouble(), b.toDouble());
  if (a.isComplexDouble() && b.isComplexDouble()) {
    auto x = a.toComplexDouble(), y = b.toComplexDouble();
    return same_bits(x.real(), y.real()) && same_bits(x.imag(), y.imag());
  }
  if (a.isList() && b.isList()) {
    return std::ranges::equal(a.toListRef(), b.toListRef(), same_constant);
  }
  if (a.isTensor() || b.isTensor()) return a.isTensor() && b.isTensor() && a.toTensor().is_same(b.toTensor());
  if (a.tagKind() != b.tagKind()) return false;
  return a == b;
}

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  TensorMeta meta;
  meta.dtype = tensor.scalar_type();
  meta.sizes = tensor.sizes().vec();
  if (tensor.layout() == at::kStrided && !tensor.is_nested()) meta.strides = tensor.strides().vec();
  meta.device = tensor.device();
  meta.requires_grad = tensor.requires_grad();
  return meta;
}

int64_t element_count(at::IntArrayRef sizes) {
  constexpr int64_t kMost = INT64_MAX >> 20;
  int64_t count = 1;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
    if (__builtin_mul_overflow(count, size, &count) || count > kMost) count = kMost;
  }
  return count;
}

bool TensorMeta::is_contiguous() const { return strides == contiguous_strides(sizes); }

std::optional<std::vector<int64_t>> memory_order(const TensorMeta& type) {
  if (!type.symbols.empty() || type.strides.size() != type.sizes.size()) return std::nullopt;
  std::vector<int64_t> order(type.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return type.strides[static_cast<size_t>(a)] > type.strides[static_cast<size_t>(b)];
  });
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    if (type.sizes[d] != 1 && type.strides[d] != stride) return std::nullopt;
    if (__builtin_mul_overflow(stride, type.sizes[d], &stride)) return std::nullopt;  // sizes from files may be absurd
  }
  return order;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    // As in torch, a dimension of size 0 counts as 1. Sizes from files may be absurd: wrap around, do not overflow.
    const auto step = static_cast<uint64_t>(std::max<int64_t>(sizes[i], 1));
    strides[i - 1] = static_cast<int64_t>(static_cast<uint64_t>(strides[i]) * step);
  }
  return strides;
}

std::string NodeMeta::module_path() const { return modules && !modules->empty() ? modules->back().path : ""; }

std::string NodeMeta::where() const {
  std::string text = module_path();
  if (source && !source->file.empty()) {
    std::string line = source->file + ":" + std::to_string(source->line);
    text = text.empty() ? line : text + " (" + line + ")";
  }
  return text;
}

}  // namespace plumb
