#include "plumb/pipeline/stage_backward.h"

#include <ATen/ATen.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <typeindex>

#include "plumb/core/error.h"
#include "plumb/pipeline/describe.h"

namespace plumb {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
// An intrusive pointer from torch 2.12 on, a std::shared_ptr before.
using NodePtr = decltype(Edge::function);

template <typename T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::make_shared<T>();
  } else {
    return c10::make_intrusive<T>();
  }
}

// The end of autograd's graph at a stage's inputs: keeps what arrives.
struct StageInputNode : Node {
  variable_list gradients;
  variable_list apply(variable_list&& grads) override {
    gradients = std::move(grads);
    return {};
  }
  std::string name() const override { return "plumb::StageInput"; }
};

bool can_have_gradient(const at::Tensor& t) {
  return t.defined() && (at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()));
}

// Roots of a backward: edges and gradients of the outputs that take part.
struct Roots {
  edge_list edges;
  variable_list grads;
};

Roots collect_roots(const Tensors& outputs, const Tensors& output_grads) {
  if (!output_grads.empty() && output_grads.size() != outputs.size()) {
    throw Error(ErrorKind::InvalidArgument,
                "stage backward got " + std::to_string(outputs.size()) + " outputs and " +
                    std::to_string(output_grads.size()) + " output gradients",
                "", "give one gradient per output (undefined for none), or none at all");
  }
  Roots roots;
  for (size_t i = 0; i < outputs.size(); i++) {
    const auto& out = outputs[i];
    if (!out.defined() || !out.requires_grad()) continue;
    auto edge = torch::autograd::impl::gradient_edge(out);
    // Sizes are the node's, not the tensor's: a handle stands for a tensor that is gone.
    const auto& meta = edge.function->input_metadata(edge.input_nr);
    const auto sizes = C10_AS_INTARRAYREF_SLOW(meta.shape_as_dim_vector());
    at::Tensor grad = output_grads.empty() ? at::Tensor() : output_grads[i];
    if (!grad.defined()) {
      if (!output_grads.empty() && c10::multiply_integers(sizes) != 1) {
        throw Error(ErrorKind::InvalidArgument,
                    "output " + std::to_string(i) + " of the stage, " + describe(sizes, meta.options()) +
                        ", requires a gradient and got none; only a one-element output may go without",
                    "", "give a gradient of the same sizes, or leave the output out");
      }
      grad = at::ones(sizes, meta.options());
    } else if (grad.sizes() != sizes) {
      throw Error(ErrorKind::InvalidArgument, "output " + std::to_string(i) + " of the stage is " +
                                                  describe(sizes, meta.options()) + ", its gradient " + describe(grad));
    }
    roots.edges.push_back(std::move(edge));
    roots.grads.push_back(std::move(grad));
  }
  return roots;
}

[[noreturn]] void raise_failed(const char* what, const std::exception& cause, const Tensors& outputs,
                               const Tensors& output_grads, const Tensors& inputs) {
  if (const auto* own = dynamic_cast<const Error*>(&cause)) throw Error(*own);
  throw Error(
      ErrorKind::InvalidArgument, std::string(what) + " failed: " + first_line(cause.what()),
      "outputs " + describe(outputs) + "; output gradients " + describe(output_grads) + "; inputs " + describe(inputs));
}

variable_list run_engine(const edge_list& roots, const variable_list& grads, bool keep_graph,
                         const edge_list& outputs = {}) {
  return Engine::get_default_engine().execute(roots, grads, keep_graph, /*create_graph=*/false,
                                              /*accumulate_grad=*/outputs.empty(), outputs);
}

// Built-in nodes are pure functions of what they saved and compute only what is asked for, so running one once for its
// input and once for its weights costs and gives the same as running it once. So are plumb's own functions.
bool may_run_twice(Node& node) {
  if (!node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
      !node.retains_grad_hooks().empty()) {
    return false;
  }
  // By type: all of Python's functions are one, and asking them raises.
  static thread_local std::unordered_map<std::type_index, bool> known;
  auto [it, fresh] = known.try_emplace(std::type_index(typeid(node)), false);
  if (!fresh) return it->second;
  try {
    it->second = node.is_traceable();
  } catch (const std::exception&) {
    return false;
  }
  it->second = it->second || node.name().find("CppNode<plumb::") != std::string::npos;
  return it->second;
}

// Nodes that the engine only runs rightly in a backward of everything: writes into views look at and change the list of
// nodes to run; a re-entrant checkpoint starts a backward() of its own.
bool needs_whole_backward(const std::string& name) {
  return name.find("CopySlices") != std::string::npos || name.find("CheckpointFunctionBackward") != std::string::npos;
}

// The graph below the roots, children before parents.
struct Walk {
  struct Entry {
    Node* node;
    int first_child;             // into `children`
    bool in_input_half = false;  // runs in the input half
    bool target = false;         // an input, or a node whose gradient the input half completes
    bool start = false;          // the weight half starts here
    bool twice = true;
  };
  std::vector<Entry> entries;
  std::vector<int> children;  // one per edge; -1 for none
  ska::flat_hash_map<Node*, int> index;

  size_t num_children(const Entry& e) const { return e.node->next_edges().size(); }
};

Walk walk_graph(const edge_list& roots, const edge_list& inputs) {
  Walk walk;
  ska::flat_hash_map<Node*, bool> input_nodes;
  for (const auto& edge : inputs) {
    if (edge.function) input_nodes.emplace(edge.function.get(), true);
  }
  std::vector<std::pair<Node*, size_t>> stack;
  constexpr int kOpen = -2;
  auto open = [&](Node* node) {
    walk.index.emplace(node, kOpen);
    stack.emplace_back(node, 0);
  };
  for (const auto& root : roots) {
    if (walk.index.find(root.function.get()) != walk.index.end()) continue;
    open(root.function.get());
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      const bool is_input = input_nodes.find(node) != input_nodes.end();
      const auto& edges = node->next_edges();
      if (!is_input && next < edges.size()) {
        Node* child = edges[next++].function.get();
        if (child != nullptr && walk.index.find(child) == walk.index.end()) open(child);
        continue;
      }
      Walk::Entry entry{node, static_cast<int>(walk.children.size())};
      entry.target = is_input;
      for (const auto& edge : edges) {
        walk.children.push_back(is_input || !edge.function ? -1 : walk.index.find(edge.function.get())->second);
      }
      entry.twice = is_input || may_run_twice(*node);
      walk.index.find(node)->second = static_cast<int>(walk.entries.size());
      walk.entries.push_back(entry);
      stack.pop_back();
    }
  }
  return walk;
}

// Decides which nodes run in the input half and where the weight half starts.
void divide(Walk& walk) {
  // A node that may not run twice pulls all its children into the input half, and by that more nodes above them.
  for (bool changed = true; changed;) {
    changed = false;
    for (auto& e : walk.entries) {
      const int* child = walk.children.data() + e.first_child;
      const size_t n = walk.num_children(e);
      if (!e.in_input_half) {
        for (size_t k = 0; k < n; k++) {
          if (child[k] >= 0 && (walk.entries[child[k]].target || walk.entries[child[k]].in_input_half)) {
            e.in_input_half = true;
            break;
          }
        }
      }
      if (!e.in_input_half || e.twice) continue;
      for (size_t k = 0; k < n; k++) {
        if (child[k] < 0) continue;
        auto& c = walk.entries[child[k]];
        if (!c.target && !c.in_input_half) {
          c.target = true;
          c.start = true;
          changed = true;
        }
      }
    }
  }
  for (auto& e : walk.entries) {
    if (!e.in_input_half) continue;
    e.start = false;
    if (!e.twice) continue;
    const int* child = walk.children.data() + e.first_child;
    for (size_t k = 0; k < walk.num_children(e) && !e.start; k++) {
      e.start = child[k] >= 0 && !walk.entries[child[k]].target && !walk.entries[child[k]].in_input_half;
    }
  }
}

struct Start {
  Edge edge;
  at::Tensor grad;
  bool hooks_done;  // the node's hooks on incoming gradients have run
};

struct Cut {
  NodePtr node;
  size_t index;
  Edge edge;
};

// Takes the hooks on incoming gradients off nodes for a while.
class HooksOff {
 public:
  explicit HooksOff(const std::vector<Start>& starts) {
    for (const auto& s : starts) {
      if (!s.hooks_done) continue;
      Node& node = *s.edge.function;
      if (node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty()) continue;
      kept_.push_back({&node, std::move(node.tensor_pre_hooks()), std::move(node.retains_grad_hooks())});
      node.tensor_pre_hooks().clear();
      node.retains_grad_hooks().clear();
    }
  }
  ~HooksOff() {
    for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
      it->node->tensor_pre_hooks() = std::move(it->pre);
      it->node->retains_grad_hooks() = std::move(it->retains);
    }
  }

 private:
  struct Kept {
    Node* node;
    std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> pre;
    std::unordered_map<size_t, std::unique_ptr<torch::autograd::FunctionPreHook>> retains;
  };
  std::vector<Kept> kept_;
};

class EdgesCut {
 public:
  explicit EdgesCut(std::vector<Cut>& cuts) : cuts_(cuts) {
    for (auto& cut : cuts_) cut.edge = std::exchange(cut.node->next_edges()[cut.index], Edge());
  }
  ~EdgesCut() {
    for (auto& cut : cuts_) cut.node->next_edges()[cut.index] = std::move(cut.edge);
  }

 private:
  std::vector<Cut>& cuts_;
};

}  // namespace

struct InputBoundary::State {
  NodePtr node;
  Tensors inputs;
  std::vector<Edge> edges;  // by input; empty function where no gradient stops
};

struct DeferredWeights::State {
  std::vector<Start> starts;
  std::vector<Cut> cuts;  // still to be cut, because the graph is kept whole
};

struct BackwardAccess {
  static const InputBoundary::State& of(const InputBoundary& b) { return *b.state_; }
  static DeferredWeights::State& fresh(DeferredWeights& d) {
    d.state_ = std::make_unique<DeferredWeights::State>();
    return *d.state_;
  }
  static std::unique_ptr<DeferredWeights::State>& state(DeferredWeights& d) { return d.state_; }
};

at::Tensor backward_handle(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return {};
  at::Tensor handle = at::empty({0}, output.options());
  torch::autograd::impl::set_gradient_edge(handle, torch::autograd::impl::gradient_edge(output));
  return handle;
}

InputBoundary::InputBoundary(const Tensors& values, const std::vector<bool>& wants_gradient)
    : state_(std::make_unique<State>()) {
  if (wants_gradient.size() != values.size()) {
    throw Error(ErrorKind::InvalidArgument, "an input boundary of " + std::to_string(values.size()) + " values got " +
                                                std::to_string(wants_gradient.size()) + " gradient flags");
  }
  state_->inputs.reserve(values.size());
  state_->edges.resize(values.size());
  for (size_t i = 0; i < values.size(); i++) {
    if (!values[i].defined()) {
      state_->inputs.emplace_back();
      continue;
    }
    // Shares memory and version counter with the value, so that a write is noticed where the value was saved.
    at::Tensor alias = values[i].tensor_data();
    if (wants_gradient[i] && can_have_gradient(values[i])) {
      if (!state_->node) state_->node = make_node<StageInputNode>();
      torch::autograd::create_gradient_edge(alias, state_->node);
      state_->edges[i] = torch::autograd::impl::gradient_edge(alias);
    }
    state_->inputs.push_back(std::move(alias));
  }
}

InputBoundary::InputBoundary(InputBoundary&&) noexcept = default;
InputBoundary& InputBoundary::operator=(InputBoundary&&) noexcept = default;
InputBoundary::~InputBoundary() = default;
const Tensors& InputBoundary::inputs() const { return state_->inputs; }
void InputBoundary::release_inputs() { state_->inputs.clear(); }

DeferredWeights::DeferredWeights() = default;
DeferredWeights::DeferredWeights(DeferredWeights&&) noexcept = default;
DeferredWeights& DeferredWeights::operator=(DeferredWeights&&) noexcept = default;
DeferredWeights::~DeferredWeights() = default;
bool DeferredWeights::pending() const { return state_ != nullptr; }

namespace {

void add_seeds(Roots& roots, const std::vector<Edge>& input_edges, const Tensors& seeds) {
  if (seeds.empty()) return;
  if (seeds.size() != input_edges.size()) {
    throw Error(ErrorKind::InvalidArgument, "a stage of " + std::to_string(input_edges.size()) + " inputs got " +
                                                std::to_string(seeds.size()) + " input gradients to start from");
  }
  for (size_t i = 0; i < seeds.size(); i++) {
    if (!seeds[i].defined() || !input_edges[i].function) continue;
    roots.edges.push_back(input_edges[i]);
    roots.grads.push_back(seeds[i]);
  }
}

std::vector<Edge> leaf_edges(const Tensors& inputs, bool leaves_only) {
  std::vector<Edge> edges(inputs.size());
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    if (leaves_only && !inputs[i].is_leaf()) {
      throw Error(ErrorKind::InvalidArgument,
                  "input " + std::to_string(i) + " of the stage, " + describe(inputs[i]) + ", is not a leaf", "",
                  "detach it before the stage's forward, or use an InputBoundary");
    }
    edges[i] = torch::autograd::impl::gradient_edge(inputs[i]);
  }
  return edges;
}

// Everything in the input half, for graphs with nodes that stand no other way: what reaches the leaves is set aside.
Tensors whole_backward_now(const Roots& roots, const Walk& walk, const std::vector<Edge>& inputs, bool keep_graph,
                           DeferredWeights::State& deferred) {
  struct Leaf {
    AccumulateGrad* node;
    at::Tensor before;
  };
  std::vector<Leaf> leaves;
  for (const auto& e : walk.entries) {
    auto* node = dynamic_cast<AccumulateGrad*>(e.node);
    if (node == nullptr) continue;
    if (node->tensor_post_acc_grad_hooks() != nullptr) {
      throw Error(ErrorKind::InvalidArgument,
                  "a weight " + describe(node->variable) +
                      " has a hook that runs after accumulation, and the stage writes into views or uses re-entrant "
                      "checkpoints: its backward cannot be divided",
                  "", "use a schedule with full backwards (1F1B, GPipe)");
    }
    leaves.push_back({node, node->variable.grad()});
    node->variable.mutable_grad() = at::Tensor();
  }
  std::vector<at::Tensor> taken(leaves.size());
  auto restore = [&] {
    for (size_t i = 0; i < leaves.size(); i++) {
      taken[i] = leaves[i].node->variable.grad();
      leaves[i].node->variable.mutable_grad() = leaves[i].before;
    }
  };
  try {
    run_engine(roots.edges, roots.grads, keep_graph);
  } catch (...) {
    restore();
    throw;
  }
  restore();
  Tensors input_grads(inputs.size());
  std::set<Node*> is_input;
  for (size_t i = 0; i < inputs.size(); i++) {
    Node* node = inputs[i].function.get();
    if (node == nullptr) continue;
    is_input.insert(node);
    if (auto* boundary = dynamic_cast<StageInputNode*>(node)) {
      if (inputs[i].input_nr < boundary->gradients.size()) input_grads[i] = boundary->gradients[inputs[i].input_nr];
    } else if (dynamic_cast<AccumulateGrad*>(node) == nullptr) {
      throw Error(ErrorKind::InvalidArgument,
                  "input " + std::to_string(i) +
                      " is not a leaf, and the stage writes into views or uses re-entrant "
                      "checkpoints",
                  "", "detach it before the stage's forward");
    }
  }
  for (size_t i = 0; i < leaves.size(); i++) {
    if (is_input.count(leaves[i].node)) {
      for (size_t k = 0; k < inputs.size(); k++) {
        if (inputs[k].function.get() == leaves[i].node) input_grads[k] = taken[i];
      }
    } else if (taken[i].defined()) {
      deferred.starts.push_back({Edge(leaves[i].node->getptr(), 0), std::move(taken[i]), true});
    }
  }
  return input_grads;
}

InputHalf input_half(const Roots& roots, const std::vector<Edge>& inputs, bool keep_graph) {
  InputHalf half;
  half.input_grads.resize(inputs.size());
  if (roots.edges.empty()) return half;
  auto& deferred = BackwardAccess::fresh(half.deferred);
  Walk walk = walk_graph(roots.edges, inputs);
  for (const auto& e : walk.entries) {
    if (!e.twice && needs_whole_backward(e.node->name())) {
      half.input_grads = whole_backward_now(roots, walk, inputs, keep_graph, deferred);
      return half;
    }
  }
  divide(walk);

  edge_list first_edges, wanted;
  variable_list first_grads;
  for (size_t i = 0; i < roots.edges.size(); i++) {
    const auto& e = walk.entries[walk.index.find(roots.edges[i].function.get())->second];
    if (e.target || e.in_input_half) {
      first_edges.push_back(roots.edges[i]);
      first_grads.push_back(roots.grads[i]);
    } else {
      deferred.starts.push_back({roots.edges[i], roots.grads[i], false});
    }
  }
  std::vector<size_t> wanted_input;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i].function || walk.index.find(inputs[i].function.get()) == walk.index.end()) continue;
    wanted.push_back(inputs[i]);
    wanted_input.push_back(i);
  }
  for (const auto& e : walk.entries) {
    if (!e.start) continue;
    for (uint32_t k = 0; k < e.node->num_inputs(); k++) wanted.emplace_back(e.node->getptr(), k);
    if (!e.in_input_half) continue;
    for (size_t k = 0; k < walk.num_children(e); k++) {
      const int c = walk.children[e.first_child + k];
      if (c >= 0 && (walk.entries[c].target || walk.entries[c].in_input_half)) {
        deferred.cuts.push_back({e.node->getptr(), k, Edge()});
      }
    }
  }
  if (!first_edges.empty()) {
    variable_list grads = run_engine(first_edges, first_grads, /*keep_graph=*/true, wanted);
    for (size_t i = 0; i < wanted_input.size(); i++) half.input_grads[wanted_input[i]] = std::move(grads[i]);
    for (size_t i = wanted_input.size(); i < wanted.size(); i++) {
      if (!grads[i].defined()) continue;
      const auto& e = walk.entries[walk.index.find(wanted[i].function.get())->second];
      deferred.starts.push_back({wanted[i], std::move(grads[i]), !e.in_input_half});
    }
  }
  if (!keep_graph) {
    // Last use of these nodes: what they saved, and then they themselves, need not wait for the weight half.
    for (const auto& e : walk.entries) {
      if (e.in_input_half && !e.start) e.node->release_variables();
    }
    std::vector<Edge> dropped;
    for (const auto& cut : deferred.cuts) {
      dropped.push_back(std::exchange(cut.node->next_edges()[cut.index], Edge()));
    }
    deferred.cuts.clear();
  }
  return half;
}

}  // namespace

Tensors stage_backward(const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs) {
  try {
    auto edges = leaf_edges(inputs, /*leaves_only=*/true);
    auto roots = collect_roots(outputs, output_grads);
    for (const auto& in : inputs) {
      if (in.defined() && in.requires_grad()) in.mutable_grad() = at::Tensor();
    }
    if (!roots.edges.empty()) run_engine(roots.edges, roots.grads, /*keep_graph=*/false);
    Tensors grads(inputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
      if (inputs[i].defined() && inputs[i].requires_grad()) grads[i] = inputs[i].grad();
    }
    for (const auto& in : inputs) {
      if (in.defined() && in.requires_grad()) in.mutable_grad() = at::Tensor();
    }
    return grads;
  } catch (const std::exception& e) {
    raise_failed("stage backward", e, outputs, output_grads, inputs);
  }
}

Tensors stage_backward(const Tensors& outputs, const Tensors& output_grads, const InputBoundary& inputs,
                       const Tensors& input_seeds) {
  const auto& boundary = BackwardAccess::of(inputs);
  try {
    auto roots = collect_roots(outputs, output_grads);
    add_seeds(roots, boundary.edges, input_seeds);
    auto* node = static_cast<StageInputNode*>(boundary.node.get());
    if (node != nullptr) node->gradients.clear();
    if (!roots.edges.empty()) run_engine(roots.edges, roots.grads, /*keep_graph=*/false);
    Tensors grads(boundary.edges.size());
    if (node == nullptr || node->gradients.empty()) return grads;
    for (size_t i = 0; i < grads.size(); i++) {
      if (boundary.edges[i].function) grads[i] = std::move(node->gradients[boundary.edges[i].input_nr]);
    }
    node->gradients.clear();
    return grads;
  } catch (const std::exception& e) {
    raise_failed("stage backward", e, outputs, output_grads, boundary.inputs);
  }
}

InputHalf stage_backward_input(const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs,
                               bool keep_graph) {
  try {
    return input_half(collect_roots(outputs, output_grads), leaf_edges(inputs, /*leaves_only=*/false), keep_graph);
  } catch (const std::exception& e) {
    raise_failed("input half of the stage backward", e, outputs, output_grads, inputs);
  }
}

InputHalf stage_backward_input(const Tensors& outputs, const Tensors& output_grads, const InputBoundary& inputs,
                               const Tensors& input_seeds, bool keep_graph) {
  const auto& boundary = BackwardAccess::of(inputs);
  try {
    auto roots = collect_roots(outputs, output_grads);
    add_seeds(roots, boundary.edges, input_seeds);
    return input_half(roots, boundary.edges, keep_graph);
  } catch (const std::exception& e) {
    raise_failed("input half of the stage backward", e, outputs, output_grads, boundary.inputs);
  }
}

void stage_backward_weight(DeferredWeights& deferred, bool retain_graph) {
  auto& state = BackwardAccess::state(deferred);
  if (!state) {
    throw Error(ErrorKind::InvalidArgument, "the weight half of this stage backward has run already", "",
                "run stage_backward_input first, or pass retain_graph to the weight half");
  }
  edge_list edges;
  variable_list grads;
  for (auto& s : state->starts) {
    edges.push_back(s.edge);
    grads.push_back(retain_graph ? s.grad : std::move(s.grad));
  }
  try {
    HooksOff hooks(state->starts);
    EdgesCut cut(state->cuts);
    if (!edges.empty()) run_engine(edges, grads, retain_graph);
  } catch (const std::exception& e) {
    raise_failed("weight half of the stage backward", e, {}, grads, {});
  }
  if (!retain_graph) state.reset();
}

}  // namespace plumb
