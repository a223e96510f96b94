#include "plumb/graph/graph.h"

#include <algorithm>
#include <cctype>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/graph/copy_node.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

// Nodes get positions with gaps, so that inserting rarely renumbers.
constexpr uint64_t kGap = uint64_t{1} << 32;

std::string make_identifier(std::string_view hint) {
  std::string name;
  for (unsigned char c : hint) name += (std::isalnum(c) && c < 128) || c == '_' ? static_cast<char>(c) : '_';
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0]))) name.insert(0, "_");
  return name;
}

ValueType value_type(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return ValueType::Tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return ValueType::Int;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType: return ValueType::Float;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType: return ValueType::Bool;
    case c10::TypeKind::OptionalType: return value_type(type->castRaw<c10::OptionalType>()->getElementType());
    default: return ValueType::Other;
  }
}

// Is the return a list whose elements become values of their own?
const c10::ListType* expanded_list(const c10::Argument& ret) {
  const auto* list = ret.type()->castRaw<c10::ListType>();
  return list && value_type(list->getElementType()) == ValueType::Tensor ? list : nullptr;
}

}  // namespace

void Value::set_meta(std::optional<TensorMeta> meta) {
  meta_ = std::move(meta);
  ++producer_->graph_->version_;
}

void Value::set_type(ValueType type) {
  type_ = type;
  ++producer_->graph_->version_;
}

bool is_identifier(std::string_view name) {
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0]))) return false;
  return std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

void Value::rename(std::string name) {
  if (name == name_) return;
  Graph& graph = *producer_->graph_;
  if (!is_identifier(name))
    throw Error(ErrorKind::InvalidArgument, "'" + name + "' is not a name: letters, digits and _");
  if (graph.names_.count(name)) throw Error(ErrorKind::InvalidArgument, "the graph has a value %" + name + " already");
  graph.names_.erase(name_);
  name_ = std::move(name);
  graph.names_.emplace(name_, this);
  ++graph.version_;
}

std::string operator_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

std::optional<c10::OperatorHandle> try_find_operator(std::string_view name) {
  const size_t dot = name.find('.');
  std::string base(name.substr(0, dot));
  std::string overload(dot == std::string_view::npos ? "" : name.substr(dot + 1));
  if (overload == "default") overload.clear();
  return c10::Dispatcher::singleton().findSchema({base, overload});
}

c10::OperatorHandle find_operator(std::string_view name) {
  if (auto found = try_find_operator(name)) return *found;
  const std::string base(name.substr(0, name.find('.')));
  std::vector<std::string> others;
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name == base) others.push_back(toString(op));
  }
  throw Error(ErrorKind::UnknownName, "no operator '" + std::string(name) + "' is registered", "",
              others.empty()
                  ? "load the library that registers '" + base.substr(0, base.find(':')) + "' operators first"
                  : "one of its overloads: " + join(others));
}

Graph::Graph() = default;
Graph::~Graph() { clear(); }

Graph::Graph(Graph&& other) noexcept { *this = std::move(other); }

Graph& Graph::operator=(Graph&& other) noexcept {
  if (this == &other) return *this;
  clear();
  first_ = std::exchange(other.first_, nullptr);
  last_ = std::exchange(other.last_, nullptr);
  output_ = std::exchange(other.output_, nullptr);
  insert_before_ = nullptr;
  size_ = std::exchange(other.size_, 0);
  id_end_ = std::exchange(other.id_end_, 0);
  // Caches that key on the version see a moved-in graph as another graph.
  const bool sound = other.sound_version_ == other.version_;
  version_ = std::max(version_, other.version_) + 1;
  sound_version_ = sound ? version_ : UINT64_MAX;
  other.sound_version_ = UINT64_MAX;
  names_ = std::move(other.names_);
  counters_ = std::move(other.counters_);
  other.names_.clear();
  other.counters_.clear();
  for (Node* node : nodes()) node->graph_ = this;
  return *this;
}

void Graph::clear() {
  names_.clear();  // before the texts that it looks at
  for (Node* node = first_; node;) {
    Node* next = node->next_;
    delete node;
    node = next;
  }
  first_ = last_ = output_ = nullptr;
  size_ = 0;
}

namespace {

std::vector<Node*> nodes_of(const Graph& graph, NodeKind kind) {
  std::vector<Node*> found;
  for (Node* node : graph.nodes()) {
    if (node->kind() == kind) found.push_back(node);
  }
  return found;
}

}  // namespace

std::vector<Node*> Graph::placeholders() const { return nodes_of(*this, NodeKind::Placeholder); }
std::vector<Node*> Graph::attributes() const { return nodes_of(*this, NodeKind::GetAttr); }

Value* Graph::find_value(std::string_view name) const {
  auto it = names_.find(name);
  return it == names_.end() ? nullptr : it->second;
}

std::string Graph::unique_name(std::string_view hint) {
  std::string base = make_identifier(hint);
  if (!names_.count(base)) return base;
  uint64_t& counter = counters_[base];
  std::string name;
  do {
    name = base + "_" + std::to_string(++counter);
  } while (names_.count(name));
  return name;
}

void Graph::renumber() {
  uint64_t position = kGap;
  for (Node* node = first_; node; node = node->next_, position += kGap) node->position_ = position;
}

void Graph::link(Node* node, Node* before) {
  node->next_ = before;
  node->prev_ = before ? before->prev_ : last_;
  (node->prev_ ? node->prev_->next_ : first_) = node;
  (before ? before->prev_ : last_) = node;
  const uint64_t low = node->prev_ ? node->prev_->position_ : 0;
  if (!before) {
    node->position_ = low + kGap;
  } else {
    node->position_ = low + (before->position_ - low) / 2;
    if (node->position_ == low) renumber();
  }
  ++size_;
  ++version_;
}

void Graph::unlink(Node* node) {
  (node->prev_ ? node->prev_->next_ : first_) = node->next_;
  (node->next_ ? node->next_->prev_ : last_) = node->prev_;
  node->prev_ = node->next_ = nullptr;
  --size_;
  ++version_;
}

Node* Graph::insert(std::unique_ptr<Node> owned, std::string_view name_hint) {
  Node* node = owned.release();
  Node* before = insert_before_;
  if (!before && node->kind_ != NodeKind::Output) before = output_;
  link(node, before);
  node->attach_inputs();
  for (auto& value : node->results_) {
    value->name_ = unique_name(name_hint);
    names_.emplace(value->name_, value.get());
  }
  return node;
}

Node* Graph::placeholder(std::string name, std::optional<TensorMeta> meta, ValueType type) {
  std::unique_ptr<Node> node(new Node(this, NodeKind::Placeholder));
  node->target_ = std::move(name);
  node->results_.emplace_back(new Value(node.get(), 0, type));
  node->results_[0]->meta_ = std::move(meta);
  node->layout_ = {-1};
  // Placeholders come first, in the order they were added.
  std::string hint = node->target_;
  if (insert_before_) return insert(std::move(node), hint);
  // (Walking past them would make building many inputs quadratic: the common case is that nothing else is there yet.)
  Node* after = last_ && last_->kind_ == NodeKind::Placeholder ? nullptr : first_;
  while (after && after->kind_ == NodeKind::Placeholder) after = after->next_;
  auto here = InsertGuard(this, after);
  return insert(std::move(node), hint);
}

Node* Graph::get_attr(std::string target, std::optional<TensorMeta> meta) {
  std::unique_ptr<Node> node(new Node(this, NodeKind::GetAttr));
  node->target_ = std::move(target);
  node->results_.emplace_back(new Value(node.get(), 0, ValueType::Tensor));
  node->results_[0]->meta_ = std::move(meta);
  node->layout_ = {-1};
  std::string hint = node->target_;
  return insert(std::move(node), hint);
}

void Graph::add_results(Node* node, const std::vector<int32_t>& list_sizes) {
  size_t lists = 0;
  for (const auto& ret : node->schema().returns()) {
    const auto* list = expanded_list(ret);
    if (list && lists >= list_sizes.size()) {
      throw Error(ErrorKind::InvalidArgument,
                  "operator " + node->target_ + " returns a list: say how many elements it has");
    }
    const int32_t n = list ? list_sizes[lists++] : -1;
    if (list && n < 0) {
      throw Error(ErrorKind::InvalidArgument,
                  "operator " + node->target_ + ": a list cannot have " + std::to_string(n) + " elements");
    }
    node->layout_.push_back(n);
    const ValueType type = value_type(list ? list->getElementType() : ret.type());
    for (int32_t i = 0; i < (list ? n : 1); ++i)
      node->results_.emplace_back(new Value(node, node->results_.size(), type));
  }
  if (lists != list_sizes.size()) {
    throw Error(ErrorKind::InvalidArgument, "operator " + node->target_ + " returns " + std::to_string(lists) +
                                                " lists, sizes were given for " + std::to_string(list_sizes.size()));
  }
}

Node* Graph::call(std::string_view op, std::vector<Arg> args, std::vector<int32_t> list_sizes) {
  return call(find_operator(op), std::move(args), std::move(list_sizes));
}

Node* Graph::call(const c10::OperatorHandle& op, std::vector<Arg> args, std::vector<int32_t> list_sizes) {
  std::unique_ptr<Node> node(new Node(this, NodeKind::CallFunction));
  node->op_ = op;
  node->target_ = operator_name(op);
  node->facts_ = &operator_facts(node->target_);
  const auto& schema = op.schema();
  if (args.size() > schema.arguments().size()) {
    throw Error(ErrorKind::InvalidArgument,
                "operator " + node->target_ + " takes " + std::to_string(schema.arguments().size()) +
                    " arguments, got " + std::to_string(args.size()),
                "", "see the operator's schema: " + toString(schema));
  }
  node->args_.reserve(schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    node->args_.push_back(i < args.size() ? fit_argument(schema, i, std::move(args[i])) : default_argument(schema, i));
  }
  add_results(node.get(), list_sizes);
  std::string_view hint = node->op_name();
  hint.remove_prefix(hint.rfind(':') + 1);
  std::string name(hint);
  return insert(std::move(node), name);
}

Node* Graph::output(std::vector<Arg> values) {
  if (std::ranges::any_of(values, has_null))
    throw Error(ErrorKind::InvalidArgument, "an output of the graph is a null pointer", "",
                "give it a value of the graph");
  if (output_) {
    output_->detach_inputs();
    output_->args_ = std::move(values);
    output_->attach_inputs();
    ++version_;
    return output_;
  }
  std::unique_ptr<Node> node(new Node(this, NodeKind::Output));
  node->args_ = std::move(values);
  auto here = InsertGuard(this, nullptr);
  output_ = insert(std::move(node), "");
  return output_;
}

void Graph::replace_all_uses_with(Value* from, Value* to, const Node* except) {
  if (from == to) return;
  // set_input takes the use out of the list by swapping the last one in: going backwards meets every use once.
  for (size_t i = from->uses_.size(); i-- > 0;) {
    const Use use = from->uses_[i];
    if (use.user != except) use.user->set_input(use.index, to);
  }
  ++version_;
}

void Graph::replace_node(Node* from, Node* to) {
  if (from->num_results() != to->num_results()) {
    throw Error(ErrorKind::InvalidArgument, "cannot replace " + from->describe() + " by " + to->describe() + ": " +
                                                std::to_string(from->num_results()) + " results against " +
                                                std::to_string(to->num_results()));
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < from->num_results(); ++i) {
    names.push_back(from->result(i)->name());
    replace_all_uses_with(from->result(i), to->result(i), to);
    if (!to->result(i)->meta_) to->result(i)->meta_ = from->result(i)->meta_;
  }
  if (!to->meta_.modules) to->meta_.modules = from->meta_.modules;
  if (!to->meta_.source) to->meta_.source = from->meta_.source;
  to->meta_.grad_enabled = from->meta_.grad_enabled;
  erase(from);  // a name is free again only after this
  for (size_t i = 0; i < names.size(); ++i) to->result(i)->rename(names[i]);
}

void Graph::erase(Node* node) {
  if (node == nullptr || node->graph_ != this)
    throw Error(ErrorKind::InvalidArgument, "cannot erase a node that is not of this graph");
  for (const auto& value : node->results_) {
    if (value->has_uses()) {
      throw Error(ErrorKind::InvalidArgument,
                  "cannot erase " + node->describe() + ": %" + value->name() + " is used by " +
                      value->uses_[0].user->describe(),
                  node->meta_.where());
    }
  }
  node->detach_inputs();
  for (const auto& value : node->results_) names_.erase(value->name_);
  if (node == output_) output_ = nullptr;
  if (node == insert_before_) insert_before_ = node->next_;
  unlink(node);
  delete node;
}

Graph Graph::clone(std::unordered_map<const Node*, Node*>* map) const {
  Graph copy;
  std::vector<const Node*> twins(id_end_);  // by id
  copy.names_.reserve(names_.size());
  const ArgOf map_value = [&](Value* v) { return Arg(twins[v->producer_->id_]->result(v->index_)); };
  for (const Node* node : nodes()) {
    Node* twin = new Node(&copy, node->kind_);
    twin->target_ = node->target_;
    twin->op_ = node->op_;
    twin->facts_ = node->facts_;
    twin->layout_ = node->layout_;
    twin->meta_ = node->meta_;
    twin->args_.reserve(node->args_.size());
    for (const Arg& arg : node->args_) twin->args_.push_back(map_arg(arg, map_value));
    for (const auto& value : node->results_) {
      auto* v = new Value(twin, value->index_, value->type_);
      v->name_ = value->name_;
      v->meta_ = value->meta_;
      twin->results_.emplace_back(v);
      copy.names_.emplace(v->name_, v);
    }
    twins[node->id_] = twin;
    copy.link(twin, nullptr);
    twin->attach_inputs();
    if (node == output_) copy.output_ = twin;
    if (map) map->emplace(node, twin);
  }
  copy.counters_ = counters_;
  if (sound_version_ == version_) copy.sound_version_ = copy.version_;
  return copy;
}

uint64_t Graph::hash() const {
  // Over the text: slow next to a structural hash, but it is equal exactly when the text is.
  return std::hash<std::string>()(to_string(*this));
}

namespace {

[[noreturn]] void broken(const Node& node, const std::string& what) {
  throw Error(ErrorKind::InvalidGraph, node.describe() + ": " + what, node.meta().where());
}

void check_node(const Node& node, const Graph& graph) {
  for (size_t index = 0; index < node.num_inputs(); ++index) {
    const Value* input = node.input(index);
    const Node* producer = input->producer();
    if (&producer->graph() != &graph) broken(node, "uses %" + input->name() + " of another graph");
    if (!producer->is_before(&node)) broken(node, "uses %" + input->name() + " before it is produced");
    // A value with many uses is checked from its own side below: here only small lists are searched.
    const auto is_here = [&](const Use& use) { return use.user == &node && use.index == index; };
    if (input->uses().size() < 16 && std::ranges::none_of(input->uses(), is_here))
      broken(node, "is missing from the uses of %" + input->name());
  }
  for (size_t i = 0; i < node.num_results(); ++i) {
    const Value* result = node.result(i);
    if (graph.find_value(result->name()) != result) broken(node, "the name %" + result->name() + " is not its own");
    for (const Use& use : result->uses()) {
      if (use.index >= use.user->num_inputs() || use.user->input(use.index) != result)
        broken(node, "%" + result->name() + " lists a use that is not there");
    }
    if (result->meta() && !result->is_tensor())
      broken(node, "%" + result->name() + " is no tensor but has a tensor's type");
    if (result->meta() && !result->meta()->symbols.empty() &&
        result->meta()->symbols.size() != result->meta()->sizes.size())
      broken(node, "%" + result->name() + " has as many symbols as no tensor of its rank");
  }
  if (node.kind() == NodeKind::CallFunction) {
    const auto& schema = node.schema();
    if (node.args().size() != schema.arguments().size())
      broken(node, "has too many or too few arguments for its schema");
    for (size_t i = 0; i < node.args().size(); ++i) {
      Arg fitted = fit_argument(schema, i, node.arg(i));
      if (!(fitted == node.arg(i)))
        broken(node, "argument '" + schema.arguments()[i].name() + "' is not in the schema's form");
    }
    if (node.result_layout().size() != schema.returns().size()) broken(node, "has other results than its schema");
  }
}

}  // namespace

void lint(const Graph& graph) {
  if (graph.sound_version_ == graph.version_) return;
  size_t count = 0;
  bool placeholders_over = false;
  const Node* previous = nullptr;
  for (const Node* node : graph.nodes()) {
    ++count;
    if (&node->graph() != &graph) broken(*node, "belongs to another graph");
    if (previous && (!previous->is_before(node) || node->prev() != previous)) broken(*node, "is out of order");
    if (node->kind() == NodeKind::Placeholder) {
      if (placeholders_over) broken(*node, "an input after other nodes");
    } else {
      placeholders_over = true;
    }
    if (node->kind() == NodeKind::Output && node != graph.last()) broken(*node, "is not the last node");
    check_node(*node, graph);
    previous = node;
  }
  if (count != graph.size()) throw Error(ErrorKind::InvalidGraph, "the graph counts its nodes wrongly");
  if (!graph.output_node() || graph.last() != graph.output_node()) {
    throw Error(ErrorKind::InvalidGraph, "the graph has no output node", "",
                "call graph.output({...}); of a module that was moved, use the one that it was moved to");
  }
  graph.sound_version_ = graph.version_;
}

}  // namespace plumb
