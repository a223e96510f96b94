#include "plumb/partition/cost.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <unordered_set>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/copy_node.h"
#include "plumb/graph/plan.h"
#include "plumb/operators/einsum_labels.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/tensors/node_seeds.h"

namespace plumb {
namespace {

using c10::IValue;

// Returns whether a node is a view by its schema. Operators that only may return an input (einsum, norms) compute.
bool moves_only(const Node& node) {
  if (!node.is_call()) return true;
  const auto& returns = node.schema().returns();
  return !node.writes() && std::ranges::any_of(returns, [](const auto& r) { return r.alias_info(); });
}

// Runs a graph node by node: each as a graph of its own, so that it can be run again.
class Stepper {
 public:
  Stepper(const GraphModule& module, const State& state) : module_(module), state_(state) {}

  // `visit` gets each call, its plan and its inputs, and returns its outputs.
  using Visit = std::function<std::vector<IValue>(const Node&, const Plan&, std::vector<IValue>)>;
  void run(const std::vector<IValue>& inputs, const Visit& visit) {
    size_t next = 0;
    for (const Node* node : module_.graph().nodes()) {
      if (node->kind() == NodeKind::Placeholder) {
        if (next >= inputs.size())
          throw Error(ErrorKind::StructureMismatch, "the graph's input '" + node->target() + "' is missing");
        values_[node->result()] = inputs[next++];
      } else if (node->kind() == NodeKind::GetAttr) {
        values_[node->result()] = state_.get(node->target()).tensor;
      } else if (node->kind() != NodeKind::Output && !is_pipe_split(*node)) {
        step(*node, visit);
      }
    }
  }

 private:
  void step(const Node& node, const Visit& visit) {
    Graph one;
    std::unordered_map<const Value*, Value*> here;
    std::vector<IValue> args;
    for (Value* in : node.inputs()) {
      if (here.count(in)) continue;
      here[in] = one.placeholder(in->name(), std::nullopt, in->type())->result();
      args.push_back(values_.at(in));
    }
    Node* twin = copy_node(one, node, [&](Value* v) { return here.at(v); });
    std::vector<Arg> outputs;
    for (Value* v : twin->results()) outputs.push_back(v);
    one.output(std::move(outputs));
    const auto results = visit(node, Plan(one, state_), std::move(args));
    for (size_t i = 0; i < node.num_results(); ++i) values_[node.result(i)] = results[i];
    for (const Value* in : node.inputs()) {
      if (++used_[in] == in->uses().size()) values_.erase(in);
    }
  }
  const GraphModule& module_;
  const State& state_;
  std::unordered_map<const Value*, IValue> values_;
  std::unordered_map<const Value*, size_t> used_;
};

at::Tensor to_meta(const at::Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
}

// Returns the graph with all of its tensors, its factories' too, on the meta device.
GraphModule on_meta(const GraphModule& module) {
  State state;
  for (const Attr& attr : module.state()) state.add({attr.name, attr.kind, to_meta(attr.tensor), attr.persistent});
  GraphModule twin(module.graph().clone(), std::move(state), module.in_spec(), module.out_spec());
  for (Node* node : twin.graph().nodes()) {
    if (!node->is_call()) continue;
    for (const auto& argument : node->schema().arguments()) {
      if (argument.name() == "device") node->set_arg("device", IValue(at::Device(at::kMeta)));
    }
  }
  return twin;
}

std::vector<IValue> run_on_meta(const Node& node, const Plan& plan, std::vector<IValue> args) {
  if (node.is_op("aten::embedding")) {
    // Its meta kernel exists in Python only.
    const at::Tensor table = args.at(0).toTensor();
    auto sizes = (args.size() > 1 ? args[1] : args[0]).toTensor().sizes().vec();
    sizes.push_back(table.size(-1));
    return {at::empty(sizes, table.options())};
  }
  try {
    return plan.run(args);
  } catch (const Error&) {
    // Some meta kernels exist in Python only (layer_norm's): run this one node on zeros.
    for (IValue& v : args) {
      if (v.isTensor() && v.toTensor().defined())
        v = at::zeros(v.toTensor().sizes(), v.toTensor().options().device(at::kCPU));
    }
    std::vector<IValue> out = plan.run(std::move(args));
    for (IValue& v : out) {
      if (v.isTensor()) v = to_meta(v.toTensor());
    }
    return out;
  }
}

// Adds the metadata that the graph and its state hold. Returns whether these are those of all tensors in use.
bool add_known_metas(const GraphModule& module, ValueMetas& metas) {
  bool complete = true;
  for (const Node* node : module.graph().nodes()) {
    for (const Value* v : node->results()) {
      if (v->meta()) {
        metas[v] = *v->meta();
      } else if (node->kind() == NodeKind::GetAttr && module.state().contains(node->target()) &&
                 module.state().get(node->target()).tensor.defined()) {
        metas[v] = TensorMeta::of(module.state().get(node->target()).tensor);
      } else if (v->is_tensor() && v->has_uses()) {
        complete = false;
      }
    }
  }
  return complete;
}

ValueMetas collect_metas(const GraphModule& module, const std::vector<IValue>& inputs) {
  ValueMetas metas;
  if (add_known_metas(module, metas)) return metas;
  if (inputs.empty()) {
    throw Error(ErrorKind::InvalidGraph, "the graph does not say the shapes of all its values", "",
                "give inputs, on which it is run on the meta device");
  }
  const auto note = [&metas](const Value* v, const IValue& value) {
    if (v && value.isTensor() && value.toTensor().defined()) metas[v] = TensorMeta::of(value.toTensor());
  };
  std::vector<IValue> meta_inputs;
  for (const IValue& v : inputs) meta_inputs.push_back(v.isTensor() ? IValue(to_meta(v.toTensor())) : v);
  const GraphModule twin = on_meta(module);
  at::NoGradGuard no_grad;
  Stepper stepper(twin, twin.state());
  stepper.run(meta_inputs, [&](const Node& node, const Plan& plan, std::vector<IValue> args) {
    std::vector<IValue> out = run_on_meta(node, plan, std::move(args));
    for (size_t i = 0; i < out.size(); ++i) note(module.graph().find_value(node.result(i)->name()), out[i]);
    return out;
  });
  size_t next = 0;
  for (const Node* in : module.graph().placeholders()) note(in->result(), meta_inputs[next++]);
  return metas;
}

NodeCost static_cost(const Node& node, const ValueMetas& metas) {
  NodeCost cost;
  if (moves_only(node)) return cost;
  cost.flops = flops_of(node, metas);
  auto bytes = [&](const Value* v) {
    auto it = metas.find(v);
    return it == metas.end() ? 0 : bytes_of(it->second);
  };
  for (const Value* v : node.inputs()) cost.bytes += bytes(v);
  for (const Value* v : node.results())
    cost.bytes += bytes(v), cost.output_bytes += node.writes() && node.result_aliases_input() ? 0 : bytes(v);
  return cost;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct TimedRun {
  double forward = 0, backward = 0;  // seconds
  std::vector<bool> wants_gradient;  // flag for each result: it has a gradient edge
};

// Returns whether every derivative from a result back to its leaves is implemented. A model may use a result without
// one, such as a Bernoulli draw, where no gradient reaches it.
bool has_derivatives(const at::Tensor& result) {
  std::vector<torch::autograd::Node*> open{result.grad_fn().get()};
  std::unordered_set<torch::autograd::Node*> seen(open.begin(), open.end());
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (node == nullptr) continue;
    if (dynamic_cast<torch::autograd::Error*>(node) != nullptr) return false;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
    }
  }
  return true;
}

// Runs one forward and one backward of a node, on leaves that want gradients as its inputs did.
TimedRun time_once(const Plan& plan, const std::vector<IValue>& args) {
  std::vector<IValue> leaves;
  std::vector<at::Tensor> wanted;
  for (const IValue& v : args) {
    if (!v.isTensor() || !v.toTensor().defined()) {
      leaves.push_back(v);
      continue;
    }
    // A clone, because in-place operators change it; a product by one, because they may not change leaves.
    at::Tensor leaf = v.toTensor().detach().clone().set_requires_grad(v.toTensor().requires_grad());
    if (leaf.requires_grad()) wanted.push_back(leaf);
    leaves.emplace_back(leaf.requires_grad() ? leaf.mul(1) : leaf);
  }
  auto start = std::chrono::steady_clock::now();
  auto out = plan.run(std::move(leaves));
  TimedRun timed{seconds_since(start)};
  std::vector<at::Tensor> roots, grads;
  for (const IValue& v : out) {
    timed.wants_gradient.push_back(false);
    if (!v.isTensor() || !v.toTensor().defined() || !v.toTensor().requires_grad()) continue;
    // A view made without grad mode says that it requires a gradient, as its base does, and passes none on.
    if (!torch::autograd::impl::gradient_edge(v.toTensor()).function) continue;
    timed.wants_gradient.back() = true;
    if (!has_derivatives(v.toTensor())) continue;
    roots.push_back(v.toTensor());
    grads.push_back(at::ones_like(v.toTensor()));
  }
  if (roots.empty() || wanted.empty()) return timed;
  start = std::chrono::steady_clock::now();
  torch::autograd::grad(roots, wanted, grads, std::nullopt, false, /*allow_unused=*/true);
  timed.backward = seconds_since(start);
  return timed;
}

double sum_of(const std::vector<NodeCost>& nodes, double NodeCost::*member) {
  double sum = 0;
  for (const NodeCost& node : nodes) sum += node.*member;
  return sum;
}

}  // namespace

double GraphCost::forward() const { return sum_of(nodes, &NodeCost::forward); }
double GraphCost::backward() const { return sum_of(nodes, &NodeCost::backward); }
double GraphCost::flops() const { return sum_of(nodes, &NodeCost::flops); }

int64_t bytes_of(const std::optional<TensorMeta>& meta) {
  return meta ? meta->numel() * static_cast<int64_t>(c10::elementSize(meta->dtype)) : 0;
}

GraphCost estimate_cost(const GraphModule& module, const std::vector<IValue>& inputs, const Machine& machine) {
  const ValueMetas metas = collect_metas(module, inputs);
  GraphCost cost;
  for (const Node* node : module.graph().nodes()) {
    NodeCost& c = cost.nodes.emplace_back();
    if (!node->is_call() || is_pipe_split(*node)) continue;
    c = static_cost(*node, metas);
    c.forward = machine.seconds_per_operator +
                std::max(c.flops / machine.flops_per_second, static_cast<double>(c.bytes) / machine.bytes_per_second);
    bool floating = false;
    for (const Value* v : node->results()) {
      auto it = metas.find(v);
      floating = floating || (it != metas.end() && it->second.is_floating_point());
    }
    if (floating && node->num_inputs() > 0) c.backward = 2 * c.forward;
  }
  return cost;
}

GraphCost measure_cost(const GraphModule& module, std::vector<IValue> inputs, int repeats) {
  if (repeats < 1)
    throw Error(ErrorKind::InvalidArgument, str("a cost is measured at least once, not ", repeats, " times"));
  auto copy = module.deep_copy();
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto saved = generator_state(generator);
  GraphCost cost;
  ValueMetas metas;
  std::unordered_map<const Node*, size_t> position;
  for (const Node* node : copy->graph().nodes()) position.emplace(node, position.size());
  cost.nodes.resize(position.size());
  for (IValue& v : inputs) {
    if (v.isTensor() && v.toTensor().defined())
      v = v.toTensor().detach().clone().set_requires_grad(v.toTensor().requires_grad());
  }
  size_t next = 0;
  for (const Node* in : copy->graph().placeholders()) {
    if (next < inputs.size() && inputs[next].isTensor() && inputs[next].toTensor().defined())
      metas[in->result()] = TensorMeta::of(inputs[next].toTensor());
    ++next;
  }
  for (const Node* node : copy->graph().attributes()) {
    if (const Attr* attr = copy->state().find(node->target()); attr && attr->tensor.defined())
      metas[node->result()] = TensorMeta::of(attr->tensor);
  }
  Stepper stepper(*copy, copy->state());
  stepper.run(inputs, [&](const Node& node, const Plan& plan, std::vector<IValue> args) {
    double forward = std::numeric_limits<double>::infinity(), backward = forward;
    TimedRun timed;
    for (int r = 0; r < repeats; ++r) {
      timed = time_once(plan, args);
      forward = std::min(forward, timed.forward);
      backward = std::min(backward, timed.backward);
    }
    // Values go on cut off from their makers: only whether they want gradients matters.
    auto out = [&] {
      at::AutoGradMode mode(false);
      return plan.run(args);
    }();
    for (size_t i = 0; i < out.size(); ++i) {
      if (!out[i].isTensor() || !out[i].toTensor().defined()) continue;
      at::Tensor t = out[i].toTensor();
      metas[node.result(i)] = TensorMeta::of(t);
      if (timed.wants_gradient.at(i) && !t.requires_grad()) out[i] = t.detach().set_requires_grad(true);
    }
    NodeCost& c = cost.nodes[position.at(&node)] = static_cost(node, metas);
    c.forward = forward, c.backward = backward;
    return out;
  });
  set_generator_state(generator, saved);
  return cost;
}

namespace {

class Counter {
 public:
  Counter(const Node& node, const ValueMetas& metas) : node_(node), metas_(metas), facts_(node.facts()) {}

  double count() const {
    double all = 0;
    for (const Value* v : node_.results()) all += numel(v);
    if (node_.is_op("aten::embedding")) return 0;
    if (facts_.recurrent != RecurrentLayer::None) return recurrent();
    const double out = node_.num_results() ? numel(node_.result()) : 0;
    switch (facts_.contraction.kind) {
      case ContractionKind::None: return all;
      case ContractionKind::Product: return 2 * out * size(operand(0), facts_.contraction.operands[0].dim);
      case ContractionKind::BatchProduct: return 2 * numel(operand(0)) * size(operand(1), -1);
      case ContractionKind::Bilinear: return 2 * out * size(operand(1), -1) * (size(operand(0), -1) + 1);
      case ContractionKind::Einsum: return einsum(all);
      case ContractionKind::Attention: {
        const double keys = size(operand(1), -2);
        return 2 * numel(operand(0)) * keys + 2 * out * keys;
      }
      case ContractionKind::Convolution:
      case ContractionKind::TransposedConvolution: return convolution(out);
    }
    return all;
  }

 private:
  const TensorMeta* meta(const Value* v) const {
    auto it = v ? metas_.find(v) : metas_.end();
    return it == metas_.end() ? nullptr : &it->second;
  }
  double numel(const Value* v) const { return meta(v) ? static_cast<double>(meta(v)->numel()) : 0; }
  // dim counts from the end; 1 where there is no such dimension.
  double size(const Value* v, int64_t dim) const {
    const TensorMeta* m = meta(v);
    if (!m || static_cast<int64_t>(m->sizes.size()) < -dim) return 1;
    return static_cast<double>(m->sizes[m->sizes.size() - static_cast<size_t>(-dim)]);
  }
  const Value* argument(std::string_view name) const {
    const Arg* arg = node_.try_arg(name);
    return arg && arg->is_value() ? arg->value() : nullptr;
  }
  const Value* operand(size_t i) const { return argument(facts_.contraction.operands[i].argument); }

  // Each output element sums over a filter; if transposed, each input element is spread over one.
  double convolution(double out) const {
    const Value* weight = operand(1);
    const double filter = numel(weight) / std::max(1.0, weight && meta(weight) && !meta(weight)->sizes.empty()
                                                            ? static_cast<double>(meta(weight)->sizes[0])
                                                            : 1.0);
    const Arg* by_argument = node_.try_arg("transposed");
    const bool transposed = by_argument ? by_argument->is_constant() && by_argument->constant().toBool()
                                        : facts_.contraction.kind == ContractionKind::TransposedConvolution;
    return 2 * (transposed ? numel(operand(0)) : out) * filter;
  }

  // Every row of the input goes through the weights of all layers once.
  double recurrent() const {
    const Value* input = argument(node_.try_arg("data") ? "data" : "input");
    const double rows = numel(input) / std::max(1.0, size(input, -1));
    double weights = numel(argument("w_ih")) + numel(argument("w_hh"));
    if (const Arg* params = node_.try_arg("params"); params && params->is_list()) {
      for (const Arg& p : params->list()) {
        if (p.is_value() && meta(p.value()) && meta(p.value())->sizes.size() == 2) weights += numel(p.value());
      }
    }
    return 2 * rows * weights;
  }

  // Operands are contracted from left to right, as torch does without a path: a step multiplies over all labels of its
  // two operands, and keeps those that the result or a later operand has.
  using Labels = std::map<std::string, double>;  // with their sizes
  double einsum(double out) const {
    const Arg* equation = node_.try_arg("equation");
    const Arg* tensors = node_.try_arg("tensors");
    if (!equation || !equation->is_constant() || !tensors || !tensors->is_list() || tensors->list().size() < 2)
      return out;
    std::vector<std::vector<int64_t>> sizes;
    std::vector<size_t> dims;
    for (const Arg& tensor : tensors->list()) {
      const TensorMeta* m = meta(tensor.is_value() ? tensor.value() : nullptr);
      dims.push_back(sizes.emplace_back(m ? m->sizes : std::vector<int64_t>()).size());
    }
    const EinsumLabels names = einsum_labels(equation->constant().toStringRef(), dims);
    std::vector<Labels> operands(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (size_t d = 0; d < std::min(sizes[i].size(), names.operands[i].size()); ++d) {
        double& size = operands[i][names.operands[i][d]];
        size = std::max(size, static_cast<double>(sizes[i][d]));
      }
    }
    auto in_result = [&](const std::string& name) {
      return std::ranges::find(names.result, name) != names.result.end();
    };
    double flops = 0;
    Labels left = operands[0];
    for (size_t i = 1; i < operands.size(); ++i) {
      Labels both = left;
      for (const auto& [name, size] : operands[i]) both[name] = std::max(both[name], size);
      double product = 2;
      for (const auto& [name, size] : both) product *= size;
      flops += product;
      std::erase_if(both, [&](const auto& label) {
        const bool later = std::any_of(operands.begin() + static_cast<int64_t>(i) + 1, operands.end(),
                                       [&](const Labels& one) { return one.count(label.first) > 0; });
        return !later && !in_result(label.first);
      });
      left = std::move(both);
    }
    return flops;
  }

  const Node& node_;
  const ValueMetas& metas_;
  const OperatorFacts& facts_;
};

}  // namespace

double flops_of(const Node& node, const ValueMetas& metas) { return Counter(node, metas).count(); }

}  // namespace plumb
