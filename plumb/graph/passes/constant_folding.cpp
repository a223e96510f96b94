#include "plumb/graph/passes/constant_folding.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <unordered_set>

#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"
#include "plumb/graph/copy_node.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/pass.h"
#include "plumb/graph/plan.h"

namespace plumb {
namespace {

using Memory = Aliases::Memory;

class Folder {
 public:
  Folder(Graph& graph, State& state, const ConstantFoldingOptions& options)
      : graph_(graph), state_(state), aliases_(graph, &state), options_(options) {}

  bool run() {
    find_candidates();
    // A node that cannot be run here (another device, a kernel that is not there) is taken out, and what hangs on it.
    while (!candidates_.empty()) {
      const std::vector<Value*> wanted = read_outside();
      if (wanted.empty()) return false;
      std::vector<c10::IValue> values;
      if (compute(wanted, values) && all_fit(wanted, values)) {
        for (size_t i = 0; i < wanted.size(); ++i) replace(wanted[i], values[i]);
        erase_folded();
        return true;
      }
    }
    return false;
  }

 private:
  // --- which nodes ---
  void find_candidates() {
    for (Node* node : graph_.nodes()) {
      if (is_constant_attribute(*node)) {
        constant_attributes_.insert(node);
      } else if (could_fold(*node)) {
        candidates_.insert(node);
        for (const Value* r : node->results()) touch(aliases_.memory(r), node);
        for (Memory m : aliases_.written(node)) touch(m, node);
      }
    }
    for (Node* node : graph_.nodes()) {
      if (!candidates_.contains(node) && !constant_attributes_.contains(node)) poison_around(node);
    }
    settle();
  }

  void touch(Memory m, Node* node) {
    if (aliases_.is_written(m)) touching_[m].push_back(node);
  }

  bool is_constant_attribute(const Node& node) const {
    if (node.kind() != NodeKind::GetAttr) return false;
    const Attr* attr = state_.find(node.target());
    if (!attr || attr->kind != AttrKind::Constant || !attr->tensor.defined() || attr->tensor.is_meta()) return false;
    return !attr->tensor.requires_grad() && !aliases_.is_written(aliases_.memory(node.result()));
  }

  bool could_fold(const Node& node) const {
    if (!node.is_call() || node.is_random() || has_hidden_effects(node)) return false;
    if (node.is_op("aten::requires_grad_")) return false;  // a constant has no gradient
    for (size_t i = 0; i < node.num_inputs(); ++i) {
      const Node* from = node.input(i)->producer();
      if (!candidates_.contains(from) && !constant_attributes_.contains(from)) return false;
    }
    for (Memory m : aliases_.written(&node)) {
      if (aliases_.is_external(m) || aliases_.is_returned(m)) return false;
    }
    for (const Value* r : node.results()) {
      if (r->type() == ValueType::Other) return false;
      if (!r->is_tensor()) continue;
      const Memory m = aliases_.memory(r);
      if (aliases_.is_returned(m) || (is_uninitialized(node) && !aliases_.is_written(m))) return false;
      if (!r->meta() || r->meta()->device.is_meta() || !r->meta()->symbols.empty()) return false;
      const double bytes =
          static_cast<double>(r->meta()->numel()) * static_cast<double>(c10::elementSize(r->meta()->dtype));
      if (bytes > static_cast<double>(options_.limit_bytes)) return false;
    }
    return node.num_results() > 0;
  }

  // A node that stays reads its inputs when it runs: memory of constants has to be finished by then.
  void poison_around(const Node* node) {
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      const Memory m = aliases_.memory(node->input(i));
      const Node* last = aliases_.last_write(m);
      if (last && node->is_before(last)) poison(m);
    }
    for (Memory m : aliases_.written(node)) poison(m);
    for (const Value* r : node->results()) {
      if (aliases_.is_written(aliases_.memory(r))) poison(aliases_.memory(r));
    }
  }

  void poison(Memory m) {
    auto it = touching_.find(m);
    if (it == touching_.end()) return;
    doomed_.insert(doomed_.end(), it->second.begin(), it->second.end());
    touching_.erase(it);
  }

  void settle() {
    while (!doomed_.empty()) {
      Node* node = doomed_.back();
      doomed_.pop_back();
      if (!candidates_.erase(node)) continue;
      for (const Value* r : node->results()) {
        for (const Use& use : r->uses()) doomed_.push_back(use.user);
      }
      poison_around(node);
    }
  }

  // --- running them ---
  std::vector<Value*> read_outside() const {
    std::vector<Value*> values;
    for (const Node* node : graph_.nodes()) {
      if (!candidates_.contains(node)) continue;
      for (Value* r : node->results()) {
        bool outside = false;
        for (const Use& use : r->uses()) outside = outside || !candidates_.contains(use.user);
        if (outside) values.push_back(r);
      }
    }
    return values;
  }

  // Runs all candidates as one graph. If that fails, one by one: the first that fails is a candidate no more.
  bool compute(const std::vector<Value*>& wanted, std::vector<c10::IValue>& values) {
    at::NoGradGuard no_grad;
    std::unordered_map<const Value*, Value*> twins;
    Graph all;
    for (const Node* node : graph_.nodes()) {
      if (constant_attributes_.contains(node)) twins[node->result()] = all.get_attr(node->target())->result();
      if (candidates_.contains(node)) copy_into(all, *node, twins);
    }
    std::vector<Arg> outputs;
    for (const Value* v : wanted) outputs.emplace_back(twins.at(v));
    all.output(std::move(outputs));
    try {
      values = Plan(all, state_).run({});
      return true;
    } catch (const std::exception&) {
      drop_first_failure();
      return false;
    }
  }

  static void copy_into(Graph& to, const Node& node, std::unordered_map<const Value*, Value*>& twins) {
    const Node* twin = copy_node(to, node, [&](Value* v) { return Arg(twins.at(v)); });
    for (size_t i = 0; i < node.num_results(); ++i) twins[node.result(i)] = twin->result(i);
  }

  void drop_first_failure() {
    std::unordered_map<const Value*, c10::IValue> known;
    for (Node* node : graph_.nodes()) {
      if (constant_attributes_.contains(node)) known[node->result()] = state_.get(node->target()).tensor;
      if (!candidates_.contains(node)) continue;
      Graph one;
      std::unordered_map<const Value*, Value*> twins;
      std::vector<c10::IValue> inputs;
      for (const Value* v : node->inputs()) {
        if (twins.count(v)) continue;
        twins[v] = one.placeholder(v->name(), v->meta(), v->type())->result();
        inputs.push_back(known.at(v));
      }
      try {
        copy_into(one, *node, twins);
        std::vector<Arg> outputs;
        for (const Value* r : node->results()) outputs.emplace_back(twins.at(r));
        one.output(std::move(outputs));
        auto results = Plan(one, state_).run(std::move(inputs));
        for (size_t i = 0; i < results.size(); ++i) known[node->result(i)] = results[i];
      } catch (const std::exception&) {
        doomed_.push_back(node);
        settle();
        return;
      }
    }
    candidates_.clear();  // failed together and not one by one: nothing to rely on
  }

  // The graph was made for the values' types: others (another default dtype today) are not folded in.
  bool all_fit(const std::vector<Value*>& wanted, const std::vector<c10::IValue>& values) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto& meta = wanted[i]->meta();
      const c10::IValue& v = values[i];
      const bool fits = wanted[i]->is_tensor()
                            ? v.isTensor() && v.toTensor().defined() && v.toTensor().layout() == at::kStrided &&
                                  v.toTensor().scalar_type() == meta->dtype && v.toTensor().sizes() == meta->sizes &&
                                  v.toTensor().device().type() == meta->device.type()
                            : v.isInt() || v.isDouble() || v.isBool();
      if (!fits) doomed_.push_back(wanted[i]->producer());
    }
    const bool all = doomed_.empty();
    settle();
    return all;
  }

  // --- putting them in ---
  void replace(Value* v, const c10::IValue& value) {
    if (!v->is_tensor()) return replace_uses(graph_, v, value);
    at::Tensor tensor = value.toTensor().detach();
    std::string name;
    // A copy of a constant that nobody writes is the constant.
    const Node* from = v->producer();
    if (from->is_op("aten::clone") && constant_attributes_.contains(from->input(0)->producer())) {
      const at::Tensor& same = state_.get(from->input(0)->producer()->target()).tensor;
      if (same.strides() == tensor.strides()) name = from->input(0)->producer()->target();
    }
    if (name.empty()) {
      name = state_.unique_name("folded_" + v->name());
      state_.add({name, AttrKind::Constant, tensor, true});
    }
    auto here = graph_.inserting_before(v->producer());
    Node* constant = graph_.get_attr(name, TensorMeta::of(tensor));
    constant->meta().modules = v->producer()->meta().modules;
    constant->meta().source = v->producer()->meta().source;
    graph_.replace_all_uses_with(v, constant->result());
  }

  void erase_folded() {
    std::unordered_set<Node*> sources;
    for (Node* node = graph_.last(); node;) {
      Node* previous = node->prev();
      const bool used = is_used(*node);
      if (candidates_.contains(node) && !used) {
        for (const Value* v : node->inputs()) {
          if (constant_attributes_.contains(v->producer())) sources.insert(v->producer());
        }
        graph_.erase(node);
      } else if (sources.count(node) && !used) {
        graph_.erase(node);
      }
      node = previous;
    }
  }

  Graph& graph_;
  State& state_;
  Aliases aliases_;
  ConstantFoldingOptions options_;
  NodeSet candidates_, constant_attributes_;
  std::unordered_map<Memory, std::vector<Node*>> touching_;  // candidates that make or write a written memory
  std::vector<Node*> doomed_;
};

const RegisterPass constant_folding_pass({
    "constant_folding",
    "Computes once what is the same in every run, and keeps it as a constant.",
    {{"limit_bytes", "1048576", "largest tensor to fold"}},
    [](GraphModule& module, const PassOptions& options, std::vector<std::string>* report) {
      const size_t before = module.state().size();
      const bool changed =
          constant_folding(module.graph(), module.state(), {number_option(options, "limit_bytes", 1 << 20)});
      if (report && changed) report->push_back("made " + std::to_string(module.state().size() - before) + " constants");
      return changed;
    },
});

}  // namespace

bool constant_folding(Graph& graph, State& state, const ConstantFoldingOptions& options) {
  return Folder(graph, state, options).run();
}

}  // namespace plumb
