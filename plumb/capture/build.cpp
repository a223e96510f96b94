#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "plumb/capture/session.h"
#include "plumb/core/error.h"
#include "plumb/core/text.h"
#include "plumb/graph/aliases.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

// The modules of a graph's nodes if the front end does not know them: a C++ module has no hooks around its forward.

using ModuleTypes = std::map<std::string, std::string>;  // class names by path, "" for the root

using Path = std::optional<std::string>;

// Returns the innermost module around both; "" is the root.
std::string around(std::string a, std::string b) {
  while (a != b) {
    std::string& longer = a.size() < b.size() ? b : a;
    longer = parent_of(longer);
  }
  return a;
}

// Finds the module that a node belongs to: the owner of the state it reads. A value made of state alone passes its
// module on to its reader.
class Owners {
 public:
  Path owner_of(const Node* node) {
    Path owner;
    bool state_alone = node->num_inputs() > 0;
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      const auto known = made_of_.find(node->input(i));
      const Path of = node->input(i)->producer()->kind() == NodeKind::GetAttr
                          ? Path(parent_of(node->input(i)->producer()->target()))
                          : (known == made_of_.end() ? std::nullopt : Path(known->second));
      state_alone = state_alone && of;
      if (of) owner = owner ? around(*owner, *of) : *of;
    }
    if (owner && state_alone) {
      for (const Value* result : node->results()) made_of_[result] = *owner;
    }
    return owner;
  }

 private:
  std::unordered_map<const Value*, std::string> made_of_;
};

std::shared_ptr<const ModuleStack> stack_of(const std::string& path, const ModuleTypes& types) {
  auto stack = std::make_shared<ModuleStack>();
  for (const auto& [name, type] : types) {  // sorted: the outer ones first
    const bool holds = name.empty() || name == path || path.starts_with(name + ".");
    if (holds) stack->push_back({name, type});
  }
  return stack;
}

// Gives every call without a module one, by the parameters and buffers that are read. A node that reads one, itself or
// through a value made of such alone, is of the module that has it. Any other node is of the innermost module around
// the ones before and behind it, or around those whose results it reads, if that is farther in. So a call of a module
// without parameters counts to the module around it.
void name_modules_by_state(Graph& graph, const ModuleTypes& types) {
  std::unordered_map<std::string, std::shared_ptr<const ModuleStack>> stacks;
  std::unordered_map<const Value*, std::string> callers;  // producer's caller: its layer's parent, or its own module
  auto name = [&](Node* node, const std::string& path, const std::string& caller) {
    auto& stack = stacks[path];
    if (!stack) stack = stack_of(path, types);
    node->meta().modules = stack;
    for (const Value* result : node->results()) callers[result] = caller;
  };
  // The innermost module around the callers of what a node reads.
  auto around_inputs = [&](const Node* node) {
    Path path;
    for (const Value* value : node->inputs()) {
      const auto known = callers.find(value);
      if (known != callers.end()) path = path ? around(*path, known->second) : known->second;
    }
    return path;
  };
  Owners owners;
  std::string before;
  std::vector<Node*> open;  // since the last one with an owner
  auto close = [&](const std::string& behind) {
    const std::string place = around(before, behind);
    for (Node* node : open) {
      // The last add of a block stands before the next one, and reads what this one made.
      const Path read = around_inputs(node);
      const std::string& path = read && around(*read, place) == place ? *read : place;
      name(node, path, path);
    }
    open.clear();
    before = behind;
  };
  for (Node* node : graph.nodes()) {
    if (!node->is_call() || node->meta().modules) continue;
    const Path owner = owners.owner_of(node);
    if (owner) {
      close(*owner);
      name(node, *owner, parent_of(*owner));
    } else {
      open.push_back(node);
    }
  }
  close("");
}

class Builder {
 public:
  Builder(CallRecorder& recorder, const CaptureOptions& options) : recorder_(recorder), options_(options) {}

  std::shared_ptr<GraphModule> build(const std::vector<c10::IValue>& outputs, TreeSpec out_spec) {
    std::vector<Arg> results;
    std::vector<int> output_values;
    for (const c10::IValue& v : outputs) {
      output_values.push_back(
          v.isTensor() && v.toTensor().defined() ? recorder_.look_up(v.toTensor(), "the model's output") : -1);
    }
    bound_.resize(recorder_.values.size());
    find_used(output_values);
    inputs();
    attributes();
    for (const Record& record : recorder_.records) {
      if (live_[static_cast<size_t>(&record - recorder_.records.data())]) call(record);
    }
    write_backs();
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (output_values[i] >= 0) {
        results.push_back(value(output_values[i]));
      } else {
        results.push_back(outputs[i].isTensor() ? c10::IValue() : outputs[i]);
      }
    }
    graph_.output(std::move(results));
    refuse_unwritten_reads(graph_);
    if (!recorder_.request.module_types.empty()) name_modules_by_state(graph_, recorder_.request.module_types);
    State state;
    for (size_t i = 0; i < recorder_.attributes.size(); ++i) {
      // A constant that nothing reads was made on the way and dropped.
      if (i < recorder_.num_state || graph_.find_value(names_[i])) state.add(recorder_.attributes[i]);
    }
    auto module = std::make_shared<GraphModule>(std::move(graph_), std::move(state), recorder_.request.in_spec,
                                                std::move(out_spec));
    module->set_made_in_training(recorder_.request.training);
    return module;
  }

 private:
  // Which records stay: all, but unread results that are new memory or another record's values, such as
  // torch.tensor(..) leaves behind before lift_fresh.
  void find_used(const std::vector<int>& outputs) {
    used_.assign(recorder_.values.size(), 0);
    for (int v : outputs) {
      if (v >= 0) used_[static_cast<size_t>(v)] = 1;
    }
    for (auto [attribute, v] : recorder_.write_backs) {
      used_[static_cast<size_t>(v)] = 1;
      used_[static_cast<size_t>(recorder_.attribute_values[static_cast<size_t>(attribute)])] = 1;
    }
    live_.assign(recorder_.records.size(), 1);
    for (size_t i = recorder_.records.size(); i-- > 0;) {
      const Record& record = recorder_.records[i];
      bool wanted = false;
      for (int v : record.results) wanted = wanted || used_[static_cast<size_t>(v)];
      const OperatorFacts& facts = operator_facts(record.op.schema().name());
      const bool scrap =
          (facts.uninitialised || facts.passes_through) && !facts.has_effects && !record.op.schema().is_mutable();
      if (!wanted && scrap) {
        live_[i] = 0;
        continue;
      }
      for (const RecordedArg& arg : record.args) for_each_value(arg, [&](int v) { used_[static_cast<size_t>(v)] = 1; });
    }
  }

  void inputs() {
    std::vector<std::pair<Value*, c10::IValue>> fixed;  // inputs that are no tensors, with the only value of each
    for (size_t i = 0; i < recorder_.input_values.size(); ++i) {
      const int v = recorder_.input_values[i];
      std::string name = i < options_.input_names.size() ? options_.input_names[i] : "x" + std::to_string(i);
      if (v >= 0) {
        bind(v, graph_.placeholder(std::move(name), recorder_.values[v].meta)->result());
      } else {
        const c10::IValue& only = recorder_.request.inputs[i];
        fixed.emplace_back(graph_.placeholder(std::move(name), std::nullopt, type_of(only))->result(), only);
      }
    }
    for (const auto& [input, only] : fixed) {
      if (!only.isScalar() && !only.isString()) continue;
      graph_.call(only.isString() ? "plumb::check_input.str" : "plumb::check_input",
                  {input, only, Arg(input->producer()->target())});
    }
  }

  static ValueType type_of(const c10::IValue& value) {
    if (value.isInt()) return ValueType::Int;
    if (value.isDouble()) return ValueType::Float;
    return value.isBool() ? ValueType::Bool : ValueType::Other;
  }

  void attributes() {
    names_.resize(recorder_.attributes.size());
    for (size_t i = 0; i < recorder_.attributes.size(); ++i) {
      const int v = recorder_.attribute_values[i];
      if (v < 0 || !used_[static_cast<size_t>(v)]) continue;
      Node* node = graph_.get_attr(recorder_.attributes[i].name, recorder_.values[v].meta);
      names_[i] = node->result()->name();
      bind(v, node->result());
    }
  }

  void bind(int number, Value* v) { bound_[static_cast<size_t>(number)] = v; }

  Value* value(int number) const {
    if (Value* v = bound_[static_cast<size_t>(number)]) return v;
    throw Error(ErrorKind::Internal, "capture lost track of value " + std::to_string(number));
  }

  Arg arg(const RecordedArg& recorded) const {
    if (const int* v = std::get_if<int>(&recorded.data)) return value(*v);
    if (const auto* constant = std::get_if<c10::IValue>(&recorded.data)) return *constant;
    Arg::List list;
    for (const RecordedArg& e : std::get<std::vector<RecordedArg>>(recorded.data)) list.push_back(arg(e));
    return list;
  }

  void call(const Record& record) {
    std::vector<Arg> args;
    args.reserve(record.args.size());
    for (const RecordedArg& a : record.args) args.push_back(arg(a));
    std::vector<int32_t> lists;
    for (int32_t n : record.layout) {
      if (n >= 0) lists.push_back(n);
    }
    Node* node = graph_.call(record.op, std::move(args), std::move(lists));
    NodeMeta& meta = node->meta();
    meta.grad_enabled = record.grad_enabled;
    meta.modules = record.modules;
    meta.source = record.source;
    for (size_t i = 0; i < record.results.size(); ++i) {
      const int v = record.results[i];
      if (node->result(i)->is_tensor()) node->result(i)->set_meta(recorder_.values[v].meta);
      bind(v, node->result(i));
    }
  }

  // The model reads the old contents, and autograd may have saved them: they are read from a copy. The buffer is
  // written as soon as the new contents are there, or at the very end if they may share its memory: a model is cut
  // between layers, and what reads and writes one memory stays together.
  void write_backs() {
    if (recorder_.write_backs.empty()) return;
    const State state = [&] {
      State all;
      for (const Attr& attr : recorder_.attributes) all.add(attr);
      return all;
    }();
    const Aliases aliases(graph_, &state);
    std::unordered_map<const Node*, size_t> order;
    for (const Node* node : graph_.nodes()) order.emplace(node, order.size());
    std::vector<Node*> places;  // the last node that makes or changes the new contents; null: the end
    for (auto [attribute, number] : recorder_.write_backs) {
      const Value* fresh = value(number);
      const Node* last = aliases.last_write(aliases.memory(fresh));
      Node* place = fresh->producer();
      const bool apart = place->is_call() && !aliases.may_alias(fresh, attribute_value(attribute));
      if (apart && last && order.at(last) > order.at(place)) place = const_cast<Node*>(last);
      places.push_back(apart ? place : nullptr);
    }
    for (size_t i = 0; i < places.size(); ++i) {
      const auto [attribute, number] = recorder_.write_backs[i];
      Value* fresh = value(number);
      if (fresh->producer()->kind() == NodeKind::GetAttr && fresh != attribute_value(attribute) &&
          !aliases.is_written(aliases.memory(fresh))) {
        auto here = graph_.inserting_after(fresh->producer());  // before that one is written back, too
        Node* copy = graph_.call("aten::clone", {fresh});
        copy->result()->set_meta(fresh->meta());
        fresh = copy->result();
      }
      write_back(attribute_value(attribute), fresh, places[i]);
    }
  }

  Value* attribute_value(int attribute) const {
    return value(recorder_.attribute_values[static_cast<size_t>(attribute)]);
  }

  void write_back(Value* buffer, Value* fresh, Node* place) {
    if (buffer->has_uses()) {
      const auto users = buffer->users();
      Node* first = buffer->producer();
      while (std::ranges::find(users, first) == users.end()) first = first->next();
      auto here = graph_.inserting_before(first);
      Node* copy = graph_.call("aten::clone", {buffer});
      copy->result()->set_meta(buffer->meta());
      graph_.replace_all_uses_with(buffer, copy->result(), copy);
      if (fresh == buffer) fresh = copy->result();
    }
    auto here = graph_.inserting_before(place ? place->next() : nullptr);
    Node* write = graph_.call("aten::copy_", {buffer, fresh});
    write->meta().grad_enabled = false;
    write->result()->set_meta(buffer->meta());
  }

  CallRecorder& recorder_;
  const CaptureOptions& options_;
  Graph graph_;
  std::vector<Value*> bound_;
  std::vector<char> used_, live_;
  std::vector<std::string> names_;
};

}  // namespace

std::shared_ptr<GraphModule> build_graph(Session& session, const std::vector<c10::IValue>& outputs, TreeSpec out_spec,
                                         const CaptureOptions& options) {
  return Builder(session.recorder, options).build(outputs, std::move(out_spec));
}

namespace {

// Returns whether this first operand may be memory that nothing has written: in beta * self + ... with a beta of zero,
// and where all or a part of it is replaced (the operators in place count as writing it).
bool is_unread(const Node& node, const Value* value) {
  static const std::unordered_set<std::string_view> with_beta = {"aten::baddbmm", "aten::addmm", "aten::addbmm",
                                                                 "aten::addmv", "aten::addr"};
  static const std::unordered_set<std::string_view> replaced = {
      "aten::fill",       "aten::copy",           "aten::zero",          "aten::index_copy",
      "aten::index_fill", "aten::index_put",      "aten::masked_fill",   "aten::masked_scatter",
      "aten::scatter",    "aten::select_scatter", "aten::slice_scatter", "aten::diagonal_scatter"};
  if (node.args().empty() || node.args()[0].value() != value) return false;
  if (replaced.count(node.op_name())) return true;
  if (!with_beta.count(node.op_name())) return false;
  const Arg& beta = node.arg("beta");
  return beta.is_constant() && beta.constant().isScalar() && beta.constant().toScalar().equal(0);
}

}  // namespace

void Session::refuse_other_memory() {
  const int index = module_state_.find_moved();
  if (index < 0) return;
  recorder.refuse("the forward gives '" + recorder.attributes[static_cast<size_t>(index)].name +
                      "' other memory in a way that cannot be seen (set_data)",
                  "write the values with copy_()");
}

void Session::refuse_gradients() {
  const auto refuse = [&](const std::string& name) {
    recorder.refuse(
        "the forward runs a backward that leaves a gradient in '" + name + "', which a run of a graph does not",
        "torch.autograd.grad, which returns the gradients of what it is asked for and leaves none");
  };
  const at::Tensor changed = module_state_.find_changed_gradient();
  for (const Attr& attr : request.state) {
    if (changed.defined() && attr.tensor.is_same(changed)) refuse(attr.name);
  }
  for (size_t i = 0; i < recorder.fed.size(); ++i) {
    if (recorder.fed[i].is_leaf() && recorder.fed[i].grad().defined()) refuse("input " + std::to_string(i));
  }
}

void Session::refuse_seeds() {
  if (!module_state_.was_seeded()) return;
  recorder.refuse(
      "the forward, or another thread beside it, sets torch's random state, and a graph draws from the state that it "
      "finds",
      "set it before the call, and capture while no other thread does; for draws that stay the same keep "
      "them in a buffer");
}

void refuse_hooks(CallRecorder& recorder, const std::vector<c10::IValue>& outputs) {
  using torch::autograd::Node;
  std::vector<Node*> left;
  for (const c10::IValue& out : outputs) {
    if (out.isTensor() && out.toTensor().defined()) left.push_back(out.toTensor().grad_fn().get());
  }
  std::unordered_set<Node*> seen;
  while (!left.empty()) {
    Node* node = left.back();
    left.pop_back();
    // Hooks of parameters are the parameters' own, and go on.
    if (!node || !seen.insert(node).second || dynamic_cast<torch::autograd::AccumulateGrad*>(node)) continue;
    // plumb's own hooks are of other types: their operators' replay makes them again.
    const auto& hooks = node->tensor_pre_hooks();
    if (std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
          return std::string_view(typeid(*hook).name()).find("CppFunction") != std::string_view::npos;
        })) {
      recorder.refuse(
          "the forward registers a hook on a gradient (at " + node->name() + "), which a graph would not call",
          "write it as a custom autograd function, or register the hook on the model's output or on a parameter; "
          "torch hooks the results of an operator of your own that has no Autograd kernel: give it one, or register "
          "it for CompositeImplicitAutograd");
    }
    for (const auto& edge : node->next_edges()) left.push_back(edge.function.get());
  }
}

void refuse_unwritten_reads(const Graph& graph) {
  UninitializedMemory memory;
  for (const Node* node : graph.nodes()) {
    memory.pass(*node);
    if (!node->is_call() || is_uninitialized(*node) || node->result_aliases_input() || looks_at_shape_only(*node))
      continue;
    for (const Value* v : node->inputs()) {
      if (!memory.is_unwritten(v) || is_unread(*node, v)) continue;
      throw Error(ErrorKind::Capture,
                  node->describe() +
                      " reads memory made by torch.empty that no operator has written: it was filled outside of "
                      "torch's sight (numpy, raw pointer)",
                  node->meta().where(),
                  "fill it with torch operators, or make it with torch.tensor / torch.from_numpy");
    }
  }
}

}  // namespace plumb
