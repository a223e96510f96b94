#include "plumb/graph/aliases.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <set>

#include "plumb/core/error.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

using Memory = Aliases::Memory;

// The alias sets of an annotation, those of a list's elements too. Schemas nest two levels at most.
void collect_sets(const c10::AliasInfo& info, std::set<c10::Symbol>& sets, bool& wildcard) {
  if (info.isWildcardBefore()) wildcard = true;
  for (const auto& s : info.beforeSets()) sets.insert(s);
  for (const auto& inner : info.containedTypes()) collect_sets(inner, sets, wildcard);
}

bool is_opaque(const Node& node) { return node.facts().opaque; }

// Conversions return their input unless dtype or device changes, which the types show.
bool is_conversion_with_copy(const Node& node) {
  const std::string_view name = node.op_name();
  if (name != "aten::to" && name != "aten::type_as" && name != "aten::_to_copy") return false;
  if (node.num_inputs() == 0 || node.num_results() == 0) return false;
  const auto& from = node.input(0)->meta();
  const auto& to = node.result()->meta();
  return from && to && (from->dtype != to->dtype || from->device.type() != to->device.type());
}

// Training dropout makes its result new; evaluation, or a probability of nought, returns the input.
bool is_drawn_anew(const Node& node) {
  const Arg* p = node.is_random() ? node.try_arg("p") : nullptr;
  return p && p->is_constant() && p->constant().isDouble() && p->constant().toDouble() > 0;
}

// Returns the class of a key, a new one where the map has none.
template <class Map>
Memory class_of(Map& map, const typename Map::key_type& key, std::vector<Memory>& parents) {
  auto [it, fresh] = map.emplace(key, static_cast<Memory>(parents.size()));
  if (fresh) parents.push_back(it->second);
  return it->second;
}

}  // namespace

Memory Aliases::id(const Value* value) { return class_of(ids_, value, parent_); }

Memory Aliases::attribute(const std::string& name) {
  const Attr* attr = state_ ? state_->find(name) : nullptr;
  if (attr && attr->tensor.defined()) {
    // Tensors without memory (meta) are identified by the tensor object.
    const void* key = attr->tensor.has_storage() ? attr->tensor.storage().unsafeGetStorageImpl() : nullptr;
    return class_of(storages_, key ? key : static_cast<const void*>(attr->tensor.unsafeGetTensorImpl()), parent_);
  }
  return class_of(names_, name, parent_);
}

Memory Aliases::find(Memory m) const {
  while (parent_[m] != m) m = parent_[m] = parent_[parent_[m]];
  return m;
}

void Aliases::unite(Memory a, Memory b) { parent_[find(a)] = find(b); }

void Aliases::add_node(const Node& node) {
  for (const Value* v : node.results()) id(v);
  if (node.kind() == NodeKind::GetAttr) return unite(id(node.result()), attribute(node.target()));
  if (!node.is_call() || !node.result_aliases_input() || is_conversion_with_copy(node)) return;
  const auto& schema = node.schema();
  bool annotated = false;
  size_t next = 0;
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const int32_t count = node.result_layout()[r];
    const size_t first = next;
    next += count < 0 ? 1 : static_cast<size_t>(count);
    const auto* info = schema.returns()[r].alias_info();
    if (!info) continue;
    annotated = true;
    std::set<c10::Symbol> sets;
    bool wildcard = false, matched = false;
    collect_sets(*info, sets, wildcard);
    for (int pass = 0; pass < 2 && !matched; ++pass) {
      for (size_t i = 0; i < node.args().size(); ++i) {
        bool shares = pass == 1;  // an annotation that names no argument: any of them
        if (const auto* of = schema.arguments()[i].alias_info(); of && !shares) {
          std::set<c10::Symbol> given;
          bool any = wildcard;
          collect_sets(*of, given, any);
          shares = any || std::any_of(given.begin(), given.end(), [&](const auto& s) { return sets.count(s) > 0; });
        }
        if (!shares) continue;
        std::vector<Value*> values;
        collect_values(node.arg(i), values);
        for (const Value* v : values) {
          matched = true;
          if (!v->is_tensor()) continue;
          for (size_t k = first; k < next; ++k) unite(id(node.result(k)), id(v));
        }
      }
    }
  }
  if (annotated || is_drawn_anew(node)) return;
  for (const Value* v : node.inputs()) {
    if (!v->is_tensor()) continue;
    for (const Value* r : node.results()) unite(id(r), id(v));
  }
}

void Aliases::tidy(std::vector<Memory>& list) const {
  for (Memory& m : list) m = find(m);
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
}

std::vector<Memory> Aliases::writes_of(const Node& node) {
  std::vector<Memory> written;
  if (!node.is_call()) return written;
  for (const Value* v : is_opaque(node) ? node.inputs() : node.written_inputs()) written.push_back(id(v));
  return written;
}

Aliases::Aliases(const Graph& graph, const State* state, Inputs inputs) : state_(state) {
  ids_.reserve(graph.size() * 2);
  parent_.reserve(graph.size() * 2);
  for (const Node* node : graph.nodes()) add_node(*node);
  for (const Node* node : graph.nodes()) {
    if (std::vector<Memory> written = writes_of(*node); !written.empty()) writes_.emplace(node, std::move(written));
  }
  flags_.assign(parent_.size(), 0);
  std::vector<Memory> external;
  const auto placeholders = graph.placeholders();
  for (const Node* node : placeholders) external.push_back(id(node->result()));
  for (const auto& [key, m] : storages_) external.push_back(m);
  for (const auto& [key, m] : names_) external.push_back(m);
  if (inputs == Inputs::MayOverlapWritten && !placeholders.empty()) {
    std::vector<bool> is_written(parent_.size());
    for (const auto& [node, written] : writes_) {
      for (Memory m : written) is_written[find(m)] = true;
    }
    std::vector<Memory> shared;
    for (Memory m : external) {
      if (is_written[find(m)]) shared.push_back(m);
    }
    if (!shared.empty()) {
      for (Memory m : shared) unite(m, id(placeholders[0]->result()));
      for (const Node* node : placeholders) unite(id(node->result()), id(placeholders[0]->result()));
    }
  }
  for (Memory m : external) flags_[find(m)] |= kExternal;
  if (const Node* out = graph.output_node()) {
    for (const Value* v : out->inputs()) flags_[find(id(v))] |= kReturned;
  }
  for (auto& [node, written] : writes_) {
    tidy(written);
    for (Memory m : written) {
      flags_[m] |= kWritten;
      const Node*& last = last_write_[m];
      if (!last || last->is_before(node)) last = node;
    }
  }
}

Memory Aliases::memory(const Value* value) const {
  auto it = ids_.find(value);
  if (it == ids_.end()) throw Error(ErrorKind::Internal, "%" + value->name() + " was made after the alias analysis");
  return find(it->second);
}

const Node* Aliases::last_write(Memory m) const {
  auto it = last_write_.find(m);
  return it == last_write_.end() ? nullptr : it->second;
}

const std::vector<Memory>& Aliases::written(const Node* node) const {
  static const std::vector<Memory> none;
  auto it = writes_.find(node);
  return it == writes_.end() ? none : it->second;
}

std::vector<Memory> Aliases::read(const Node* node) const {
  std::vector<Memory> list;
  list.reserve(node->num_inputs());
  for (size_t i = 0; i < node->num_inputs(); ++i) list.push_back(memory(node->input(i)));
  tidy(list);
  return list;
}

bool may_write(const Node& node) { return node.writes() || is_opaque(node); }

bool has_hidden_effects(const Node& node) {
  if (!node.is_call()) return false;
  const OperatorFacts& facts = node.facts();
  if (facts.opaque || facts.has_effects) return true;
  return node.schema().returns().empty() && !node.writes();
}

Value* written_as(const Value* result) {
  const Node& node = *result->producer();
  if (!node.is_call() || !result->is_tensor()) return nullptr;
  const auto& schema = node.schema();
  if (node.num_results() != schema.returns().size()) return nullptr;
  const auto* given_back = schema.returns()[result->result_index()].alias_info();
  if (!given_back || !given_back->isWrite()) return nullptr;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* written = schema.arguments()[i].alias_info();
    if (!written || !written->isWrite() || written->beforeSets() != given_back->beforeSets()) continue;
    if (Value* value = node.arg(i).value(); value && value->is_tensor()) return value;
  }
  return nullptr;
}

void collect_values(const Arg& arg, std::vector<Value*>& out) {
  if (arg.is_value()) out.push_back(arg.value());
  if (arg.is_list()) {
    for (const Arg& e : arg.list()) collect_values(e, out);
  }
}

std::vector<const Attr*> written_state(const Graph& graph, const State& state) {
  const Aliases aliases(graph, &state);
  std::vector<const Attr*> written;
  for (const Node* node : graph.nodes()) {
    if (node->kind() == NodeKind::GetAttr && aliases.is_written(aliases.memory(node->result())))
      written.push_back(&state.get(node->target()));
  }
  return written;
}

std::vector<size_t> written_inputs(const Graph& graph) {
  const Aliases aliases(graph, nullptr, Aliases::Inputs::Distinct);
  const std::vector<Node*> inputs = graph.placeholders();
  std::vector<size_t> written;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (aliases.is_written(aliases.memory(inputs[i]->result()))) written.push_back(i);
  }
  return written;
}

bool is_detach(const Node& node) { return node.is_op("aten::detach") || node.is_op("plumb::data"); }

bool looks_at_shape_only(const Node& node) {
  if (!node.is_call()) return false;
  const std::string_view name = node.op_name();
  return name.ends_with("_like") || name.starts_with("aten::new_") || name == "aten::size" ||
         name == "aten::sym_size" || node.target() == "aten::bernoulli.p";
}

bool is_uninitialized(const Node& node) { return node.facts().uninitialised; }

const Value* UninitializedMemory::base_of(const Value* value) const {
  const auto it = base_.find(value);
  return it == base_.end() ? value : it->second;
}

bool UninitializedMemory::is_unwritten(const Value* value) const {
  const auto it = written_.find(base_of(value));
  return it != written_.end() && !it->second;
}

void UninitializedMemory::pass(const Node& node) {
  if (!node.is_call()) return;
  auto written = node.written_inputs();
  if (written.empty() && is_uninitialized(node)) {
    const auto& meta = node.result()->meta();
    if (!meta || meta->numel() > 0) written_.emplace(node.result(), false);
    return;
  }
  const std::string_view name = node.op_name();
  if (name == "aten::detach_" || name == "aten::resize_") written.clear();  // their memory stays as it was
  for (const Value* v : written)
    if (holds(v)) written_[base_of(v)] = true;
  const Value* shown = written.empty() ? nullptr : written[0];
  if (!shown && node.result_aliases_input()) {
    for (const Value* v : node.inputs())
      if (!shown && holds(v)) shown = v;
  }
  if (!shown || !holds(shown)) return;
  for (const Value* r : node.results()) base_.emplace(r, base_of(shown));
}

GradientFlow::GradientFlow(const Graph& graph, const Aliases& aliases, const State* state) : aliases_(aliases) {
  auto differentiable = [](const Value* v) {
    return v->is_tensor() &&
           (!v->meta() || at::isFloatingType(v->meta()->dtype) || at::isComplexType(v->meta()->dtype));
  };
  for (const Node* node : graph.nodes()) {
    bool flows = false;
    switch (node->kind()) {
      case NodeKind::Placeholder: flows = true; break;
      case NodeKind::GetAttr: {
        const Attr* attr = state ? state->find(node->target()) : nullptr;
        flows = !attr || !attr->tensor.defined() || attr->tensor.requires_grad();
        break;
      }
      default:
        if (is_opaque(*node)) flows = true;
        for (size_t i = 0; i < node->num_inputs() && !flows; ++i) flows = may_require_grad(node->input(i));
        if (is_detach(*node)) flows = false;
        if (!node->meta().grad_enabled) {
          // Eager's views keep requiring gradients when made without grad mode; a write changes nothing about it.
          const Value* target = aliases.written(node).empty() || node->num_inputs() == 0 ? nullptr : node->input(0);
          flows = flows && node->result_aliases_input() && (!target || may_require_grad(target));
        }
        if (node->is_op("aten::requires_grad_")) flows = true;
    }
    if (!flows) continue;
    for (const Value* r : node->results()) {
      if (differentiable(r)) values_[r] = true;
    }
    for (Aliases::Memory m : aliases.written(node)) memories_[m] = true;
  }
}

bool GradientFlow::may_require_grad(const Value* value) const {
  return values_.count(value) || memories_.count(aliases_.memory(value));
}

}  // namespace plumb
