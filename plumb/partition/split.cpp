#include "plumb/partition/split.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/core/text.h"
#include "plumb/graph/copy_node.h"
#include "plumb/graph/names.h"
#include "plumb/partition/assign.h"
#include "plumb/tensors/parameter_tag.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

using detail::Assignment;

const c10::TensorImpl* impl_of(const State& state, const std::string& name) {
  const Attr* attr = state.find(name);
  return attr && attr->tensor.defined() ? attr->tensor.unsafeGetTensorImpl() : nullptr;
}

class Cutter {
 public:
  Cutter(const GraphModule& module, const SplitOptions& options)
      : module_(module), options_(options), graph_(module.graph().clone()) {}

  std::shared_ptr<Pipe> cut();

 private:
  // One graph in the making.
  struct Draft {
    Graph graph;
    std::unordered_map<const Value*, Value*> local;  // value of the whole -> value here
    std::vector<const Value*> needs;                 // values that come from elsewhere
    std::unordered_set<const Value*> needed;
    std::vector<std::string> attrs;
    std::unordered_set<std::string> has_attr;
  };

  void read_names();
  bool transmits(const std::string& name) const;
  void unify_transmitted();
  void find_owners();
  int stage_of(const Node* node) const;
  // Returns the stage that computes a value, or owns it.
  int maker_of(const Value* v) const { return owner_.count(v) ? owner_.at(v) : stage_of(v->producer()); }
  void note_needs();
  void need(int stage, const Value* v);
  void number_ports();
  void add_placeholders(int stage);
  Arg local(int stage, Value* v);
  void build(int stage);
  void finish_outputs(int stage);
  void choose_wire();
  std::vector<std::shared_ptr<GraphModule>> make_modules();
  std::vector<Pipe::Origin> origins() const;

  const GraphModule& module_;
  const SplitOptions& options_;
  Graph graph_;
  Assignment a_;
  std::optional<MemorySets> memory_;
  std::vector<Draft> drafts_;
  std::unordered_map<const Value*, size_t> input_index_;        // placeholder's value -> flat input
  std::unordered_map<const Value*, int> owner_;                 // transmitted parameter -> stage
  std::unordered_map<const c10::TensorImpl*, MultiUse> named_;  // multi_use_by_name, by tensor
  std::vector<std::vector<const Value*>> exports_;              // by stage, in port order
  std::unordered_map<const Value*, size_t> port_;
  PipeTable table_;
};

void Cutter::read_names() {
  for (const auto& [name, use] : options_.multi_use_by_name) {
    if (module_.state().get(name).kind != AttrKind::Parameter) {
      throw Error(ErrorKind::UnknownName, "'" + name + "' is no parameter, but multi_use_by_name names it");
    }
    named_[impl_of(module_.state(), name)] = use;
  }
}

bool Cutter::transmits(const std::string& name) const {
  const Attr* attr = module_.state().find(name);
  if (!attr || attr->kind != AttrKind::Parameter) return false;
  const auto own = options_.multi_use_by_name.find(name);
  if (own != options_.multi_use_by_name.end()) return own->second == MultiUse::Transmit;
  const auto tied = named_.find(impl_of(module_.state(), name));
  return (tied == named_.end() ? options_.multi_use : tied->second) == MultiUse::Transmit;
}

// One get_attr node for every parameter that may be sent, tied names too: it is one value with one owner.
void Cutter::unify_transmitted() {
  std::unordered_map<const c10::TensorImpl*, Node*> first;
  for (Node* node : graph_.nodes()) {
    if (node->kind() != NodeKind::GetAttr || !transmits(node->target())) continue;
    auto [it, fresh] = first.emplace(impl_of(module_.state(), node->target()), node);
    if (fresh) continue;
    graph_.replace_all_uses_with(node->result(), it->second->result());
    graph_.erase(node);
  }
}

int Cutter::stage_of(const Node* node) const {
  auto it = a_.stage.find(node);
  return it == a_.stage.end() ? ValueSource::kModelInput : it->second;
}

void Cutter::find_owners() {
  for (Node* node : graph_.nodes()) {
    if (node->kind() != NodeKind::GetAttr || !transmits(node->target())) continue;
    int first = a_.num_stages;
    for (const Use& use : node->result()->uses()) first = std::min(first, stage_of(use.user));
    owner_.emplace(node->result(), first);
  }
}

void Cutter::need(int stage, const Value* v) {
  const Node* producer = v->producer();
  if (producer->kind() == NodeKind::GetAttr) {
    auto it = owner_.find(v);
    if (it == owner_.end() || it->second == stage) return;
  } else if (producer->kind() != NodeKind::Placeholder) {
    if (a_.copied.count(producer) || stage_of(producer) == stage) return;
  }
  if (drafts_[stage].needed.insert(v).second) drafts_[stage].needs.push_back(v);
}

void Cutter::note_needs() {
  for (const Node* op : a_.ops) {
    for (const Value* v : op->inputs()) need(stage_of(op), v);
  }
  for (const Value* v : graph_.output_node()->inputs()) need(a_.num_stages - 1, v);
}

void Cutter::number_ports() {
  std::unordered_set<const Value*> sent;
  for (const Draft& draft : drafts_) sent.insert(draft.needs.begin(), draft.needs.end());
  exports_.resize(drafts_.size());
  for (const Node* node : graph_.nodes()) {
    if (node->kind() == NodeKind::Placeholder) continue;
    for (const Value* v : node->results()) {
      if (!sent.count(v)) continue;
      auto& exported = exports_[maker_of(v)];
      port_.emplace(v, exported.size());
      exported.push_back(v);
    }
  }
  table_.stages.resize(drafts_.size());
  for (size_t s = 0; s < exports_.size(); ++s) {
    for (const Value* v : exports_[s])
      table_.stages[s].outputs.push_back({v->name(), v->type(), v->meta(), {}, {}, {}});
  }
}

void Cutter::add_placeholders(int stage) {
  Draft& draft = drafts_[stage];
  auto source = [&](const Value* v) -> ValueSource {
    if (v->producer()->kind() == NodeKind::Placeholder) return {ValueSource::kModelInput, input_index_.at(v)};
    return {maker_of(v), port_.at(v)};
  };
  std::vector<std::pair<ValueSource, const Value*>> inputs;
  for (const Value* v : draft.needs) inputs.emplace_back(source(v), v);
  std::ranges::sort(inputs);
  auto& ports = table_.stages[stage].inputs;
  for (const auto& [from, v] : inputs) {
    const std::string name = from.is_model_input() ? v->producer()->target() : v->name();
    Value* here = draft.graph.placeholder(name, v->meta(), v->type())->result();
    if (here->name() != v->name()) here->rename(v->name());
    draft.local.emplace(v, here);
    bool written = false;
    if (const auto* set = memory_->written_set(v)) {
      for (const Node* w : set->writers) written = written || stage_of(w) == stage;
    }
    if (!from.is_model_input())
      table_.stages[from.stage].outputs[from.index].consumers.push_back({stage, ports.size()});
    ports.push_back({from, v->name(), v->type(), v->meta(), written});
  }
}

// Returns the stage's own value for a value of the whole: made on demand for get_attr and copied nodes.
Arg Cutter::local(int stage, Value* v) {
  Draft& draft = drafts_[stage];
  if (auto it = draft.local.find(v); it != draft.local.end()) return it->second;
  const Node* producer = v->producer();
  // Copied nodes stand on at most a few others, so this recursion is shallow.
  Node* twin = copy_node(draft.graph, *producer, [&](Value* in) { return local(stage, in); });
  if (producer->kind() == NodeKind::GetAttr && draft.has_attr.insert(producer->target()).second) {
    draft.attrs.push_back(producer->target());
  }
  for (size_t i = 0; i < producer->num_results(); ++i) draft.local.emplace(producer->result(i), twin->result(i));
  return draft.local.at(v);
}

void Cutter::finish_outputs(int stage) {
  Draft& draft = drafts_[stage];
  StageIO& io = table_.stages[stage];
  std::vector<Arg> outputs;
  if (stage + 1 < a_.num_stages) {
    for (const Value* v : exports_[stage]) {
      Arg out = local(stage, const_cast<Value*>(v));
      // A buffer's memory changes with the next microbatch: what is sent is a copy.
      const auto* set = memory_->written_set(v);
      if (set && set->has_state) out = draft.graph.call("aten::clone", {out})->result();
      outputs.push_back(std::move(out));
    }
  } else {
    for (const Arg& out : graph_.output_node()->args()) {
      if (!out.is_value()) {
        table_.outputs.push_back({std::nullopt, out.is_constant() ? out.constant() : c10::IValue()});
        continue;
      }
      const Value* v = out.value();
      table_.outputs.push_back({outputs.size(), {}});
      io.outputs.push_back({v->name(), v->type(), v->meta(), {}, table_.outputs.size() - 1, {}});
      outputs.push_back(local(stage, out.value()));
    }
  }
  draft.graph.output(std::move(outputs));
}

void Cutter::choose_wire() {
  const WireOptions& wire = options_.wire;
  std::vector<std::string> crossing;
  for (const auto& values : exports_)
    for (const Value* v : values) crossing.push_back(v->name());
  for (const std::string& pattern : wire.exclude) {
    if (std::ranges::any_of(crossing, [&](const std::string& name) { return matches_pattern(pattern, name); }))
      continue;
    crossing.resize(std::min<size_t>(crossing.size(), 12));
    throw Error(
        ErrorKind::UnknownName, "no value that crosses between stages fits '" + pattern + "'", "",
        crossing.empty() ? "exclude none: nothing goes from stage to stage" : "exclude some of " + join(crossing));
  }
  if (!wire.formats) return;
  check(wire.formats);
  auto canonical = [](const std::string& text) {
    const FPFormat* format = wire_format(text);
    return format ? format->to_string() : std::string("none");
  };
  table_.wire = {canonical(wire.formats.fwd), canonical(wire.formats.bwd)};
  const auto differentiable = differentiable_nodes(graph_, module_.state());
  for (size_t s = 0; s < exports_.size(); ++s) {
    for (size_t i = 0; i < exports_[s].size(); ++i) {
      const Value* v = exports_[s][i];
      std::string& why = table_.stages[s].outputs[i].as_it_is;
      const auto dtype = dtype_of(v, module_.state());
      if (!v->is_tensor()) {
        why = "it is no tensor";
      } else if (dtype && !has_wire_codes(*dtype)) {
        why = "its type is " + short_name(*dtype);
      } else if (!differentiable.contains(v->producer())) {
        why = "it has no gradient";
      }
      for (const std::string& pattern : wire.exclude) {
        if (why.empty() && matches_pattern(pattern, v->name())) why = "excluded by '" + pattern + "'";
      }
    }
  }
}

std::vector<std::shared_ptr<GraphModule>> Cutter::make_modules() {
  // The stages that hold a parameter's tensor, by any name.
  std::unordered_map<const c10::TensorImpl*, std::map<int, std::string>> holders;
  std::vector<const c10::TensorImpl*> order;
  for (size_t s = 0; s < drafts_.size(); ++s) {
    for (const std::string& name : drafts_[s].attrs) {
      const auto* impl = impl_of(module_.state(), name);
      if (!impl || module_.state().get(name).kind != AttrKind::Parameter) continue;
      auto& stages = holders[impl];
      if (stages.empty()) order.push_back(impl);
      stages.emplace(static_cast<int>(s), name);
    }
  }
  for (const auto* impl : order) {
    if (holders[impl].size() > 1) table_.replicated.push_back(holders[impl]);
  }
  std::vector<std::shared_ptr<GraphModule>> modules;
  for (size_t s = 0; s < drafts_.size(); ++s) {
    Draft& draft = drafts_[s];
    State state;
    std::unordered_map<const c10::TensorImpl*, at::Tensor> copies;  // tied names stay tied within a stage
    for (const Attr& attr : module_.state()) {
      if (!draft.has_attr.count(attr.name)) continue;
      Attr mine = attr;
      const auto* impl = attr.tensor.defined() ? attr.tensor.unsafeGetTensorImpl() : nullptr;
      if (auto it = holders.find(impl); it != holders.end() && it->second.begin()->first != static_cast<int>(s)) {
        at::Tensor& copy = copies[impl];
        if (!copy.defined()) {
          copy = attr.tensor.detach().clone().set_requires_grad(attr.tensor.requires_grad());
          copy_tag(attr.tensor, copy);
        }
        mine.tensor = copy;
      }
      state.add(std::move(mine));
    }
    const size_t num_outputs = table_.stages[s].outputs.size();
    TreeSpec out =
        num_outputs == 1 ? TreeSpec::leaf() : TreeSpec::tuple(std::vector<TreeSpec>(num_outputs, TreeSpec::leaf()));
    auto module =
        std::make_shared<GraphModule>(std::move(draft.graph), std::move(state),
                                      TreeSpec::positional_inputs(table_.stages[s].inputs.size()), std::move(out));
    module->copy_mode(module_);
    modules.push_back(std::move(module));
  }
  return modules;
}

std::vector<Pipe::Origin> Cutter::origins() const {
  std::unordered_map<const c10::TensorImpl*, std::pair<int, std::string>> held;
  for (size_t s = drafts_.size(); s-- > 0;) {
    for (const std::string& name : drafts_[s].attrs) {
      if (const auto* impl = impl_of(module_.state(), name)) held[impl] = {static_cast<int>(s), name};
    }
  }
  std::vector<Pipe::Origin> found;
  for (const Attr& attr : module_.state()) {
    Pipe::Origin origin{attr.name, attr.kind, attr.persistent, -1, attr.name, attr.tensor};
    if (auto it = held.find(impl_of(module_.state(), attr.name)); it != held.end() && attr.tensor.defined()) {
      origin.stage = it->second.first;
      origin.held_as = drafts_[origin.stage].has_attr.count(attr.name) ? attr.name : it->second.second;
      origin.tensor = at::Tensor();
    }
    found.push_back(std::move(origin));
  }
  return found;
}

std::shared_ptr<Pipe> Cutter::cut() {
  read_names();
  module_.lint();
  rename_after_writes(graph_);
  unify_transmitted();
  memory_.emplace(graph_, module_.state());
  a_ = detail::assign_stages(graph_, module_.state(), *memory_, options_);
  find_owners();
  drafts_.resize(a_.num_stages);
  for (const Node* node : graph_.placeholders()) {
    const size_t index = input_index_.size();
    input_index_.emplace(node->result(), index);
  }
  table_.num_inputs = input_index_.size();
  note_needs();
  number_ports();
  for (int s = 0; s < a_.num_stages; ++s) add_placeholders(s);
  for (const Node* op : a_.ops) {
    const int s = stage_of(op);
    Node* twin = copy_node(drafts_[s].graph, *op, [&](Value* v) { return local(s, v); });
    for (size_t i = 0; i < op->num_results(); ++i) drafts_[s].local.emplace(op->result(i), twin->result(i));
  }
  for (int s = 0; s < a_.num_stages; ++s) finish_outputs(s);
  choose_wire();
  if (options_.loss_spec) table_.loss_output = find_loss_output(module_.out_spec(), *options_.loss_spec);
  auto kept = origins();
  auto modules = make_modules();
  return std::make_shared<Pipe>(std::move(modules), std::move(table_), module_.graph().clone(), std::move(kept),
                                module_.in_spec(), module_.out_spec(), std::move(a_.notes));
}

// The leaves of a loss spec in the order of the outputs: false for all that it leaves out by a `false` over a subtree.
void mark(const TreeSpec& outputs, const c10::IValue& spec, const std::string& where, size_t& leaf,
          std::vector<size_t>& found) {
  auto wrong = [&](const std::string& what) {
    throw Error(ErrorKind::StructureMismatch,
                "the loss spec does not fit the outputs" + (where.empty() ? "" : " at " + where) + ": " + what, "",
                "give it the structure of the outputs, " + outputs.to_string() +
                    ", with true for the loss and false elsewhere");
  };
  if (spec.isBool()) {
    if (spec.toBool() && !outputs.is_leaf()) wrong("it says true for " + outputs.to_string());
    if (spec.toBool()) found.push_back(leaf);
    leaf += outputs.num_leaves();
    return;
  }
  if (outputs.is_leaf()) wrong("it has a structure where the output has one value");
  if (spec.isTuple() || spec.isList()) {
    const auto parts = spec.isTuple() ? spec.toTupleRef().elements().vec() : spec.toListRef().vec();
    if (outputs.type.ends_with("ict")) wrong("it is a sequence where the outputs are a dict");
    if (parts.size() != outputs.children.size()) wrong(str("it has ", parts.size(), " entries"));
    for (size_t i = 0; i < parts.size(); ++i) mark(outputs.children[i], parts[i], str(where, "[", i, "]"), leaf, found);
    return;
  }
  if (spec.isGenericDict()) {
    if (!outputs.type.ends_with("ict")) wrong("it is a dict where the outputs are none");
    const auto dict = spec.toGenericDict();
    const auto keys = outputs.keys();
    if (dict.size() != keys.size()) wrong("it has other keys");
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!dict.contains(keys[i])) wrong("it lacks the key '" + keys[i] + "'");
      mark(outputs.children[i], dict.at(keys[i]), where + "['" + keys[i] + "']", leaf, found);
    }
    return;
  }
  wrong("a " + std::string(spec.tagKind()) + " is no part of a loss spec");
}

}  // namespace

size_t find_loss_output(const TreeSpec& outputs, const c10::IValue& loss_spec) {
  std::vector<size_t> found;
  size_t leaf = 0;
  mark(outputs, loss_spec, "", leaf, found);
  if (found.size() == 1) return found[0];
  throw Error(ErrorKind::StructureMismatch,
              "the loss spec marks " + (found.empty() ? "no output" : str(found.size(), " outputs")), "",
              "mark the one output that is the loss with true");
}

std::optional<size_t> find_loss_by_name(const TreeSpec& outputs) {
  if (!outputs.type.ends_with("ict")) return std::nullopt;
  const auto keys = outputs.keys();
  size_t leaf = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == "loss" && outputs.children[i].is_leaf()) return leaf;
    leaf += outputs.children[i].num_leaves();
  }
  return std::nullopt;
}

std::shared_ptr<Pipe> pipeline(const GraphModule& module, const SplitOptions& options) {
  return Cutter(module, options).cut();
}

}  // namespace plumb
