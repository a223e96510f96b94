#include "tests/random_graph.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <random>

#include "plumb/core/error.h"

namespace plumb {
namespace {

// Builds one graph and runs every node as it is made, on real tensors: so types are the real ones. A node that would
// throw an error is removed again.
class Maker {
 public:
  Maker(uint64_t seed, const RandomGraphOptions& options) : rng_(seed), options_(options) {}

  GraphModule make() {
    state_with_everything();
    initial_ = state_.deep_copy();
    Graph graph;
    for (int i = 0; i < 2 + chance(0.3); ++i) {
      TensorMeta meta;
      meta.sizes = {4, 4};
      meta.strides = {4, 1};
      // Inputs as the tests give them: no leaves, with gradients.
      at::Tensor value = random_tensor({4, 4}).set_requires_grad(true).clone();
      add(graph.placeholder("x" + std::to_string(i), meta)->result(), value);
    }
    for (const char* name : {"a.weight", "b.weight", "tied.weight", "bias", "buffer", "constant_0"}) {
      if (chance(0.8)) attribute(graph, name);
    }
    if (pool_.size() < 3) attribute(graph, "a.weight");
    for (size_t i = 0; i < options_.nodes; ++i) step(graph);
    std::vector<Arg> outputs;
    const size_t n = 1 + below(3);
    for (size_t i = 0; i < n; ++i) outputs.emplace_back(pick().value);
    const size_t inputs = graph.placeholders().size();
    graph.output(outputs);
    return GraphModule(std::move(graph), std::move(initial_), TreeSpec::positional_inputs(inputs),
                       TreeSpec::tuple(std::vector<TreeSpec>(n, TreeSpec::leaf())));
  }

 private:
  struct Entry {
    Value* value;
    at::Tensor tensor;
  };

  // --- chance ---
  size_t below(size_t n) { return static_cast<size_t>(rng_() % n); }
  bool chance(double p) { return static_cast<double>(rng_() >> 11) * 0x1.0p-53 < p; }
  at::Tensor random_tensor(at::IntArrayRef sizes) {
    at::Tensor t = at::empty(sizes);
    for (int64_t i = 0; i < t.numel(); ++i) {
      t.data_ptr<float>()[i] = static_cast<float>(static_cast<int64_t>(below(2001)) - 1000) / 700.0f;
    }
    return t;
  }

  void state_with_everything() {
    at::Tensor tied = random_tensor({4, 4}).set_requires_grad(true);
    state_.add({"a.weight", AttrKind::Parameter, tied});
    state_.add({"b.weight", AttrKind::Parameter, random_tensor({4, 4}).set_requires_grad(true)});
    state_.add({"tied.weight", AttrKind::Parameter, tied});
    state_.add({"bias", AttrKind::Parameter, random_tensor({4}).set_requires_grad(true)});
    state_.add({"buffer", AttrKind::Buffer, random_tensor({4, 4})});
    state_.add({"constant_0", AttrKind::Constant, random_tensor({4, 4})});
  }

  void attribute(Graph& graph, const std::string& name) {
    const at::Tensor& tensor = state_.get(name).tensor;
    add(graph.get_attr(name, TensorMeta::of(tensor))->result(), tensor);
  }

  // --- values ---
  void add(Value* value, at::Tensor tensor) { pool_.push_back({value, std::move(tensor)}); }

  const Entry& pick() {
    // Mostly recent ones: long chains, and few values forgotten.
    if (chance(0.5) && pool_.size() > 6) return pool_[pool_.size() - 1 - below(6)];
    return pool_[below(pool_.size())];
  }
  const Entry* pick_like(const Entry& other) {
    for (int tries = 0; tries < 20; ++tries) {
      const Entry& e = pick();
      if (e.tensor.sizes() == other.tensor.sizes() && e.tensor.scalar_type() == other.tensor.scalar_type()) return &e;
    }
    return nullptr;
  }
  const Entry* pick_matrix() {
    for (int tries = 0; tries < 20; ++tries) {
      const Entry& e = pick();
      if (e.tensor.dim() == 2 && e.tensor.size(0) == 4 && e.tensor.size(1) == 4 && e.tensor.is_floating_point())
        return &e;
    }
    return nullptr;
  }

  // Runs the node on the tensors there are; its results join the pool. A node that fails is taken out.
  bool keep(Graph& graph, Node* node, const std::vector<at::Tensor>& inputs) {
    try {
      at::AutoGradMode mode(node->meta().grad_enabled);
      Graph one;
      std::unordered_map<const Value*, Value*> twins;
      std::vector<c10::IValue> given;
      std::vector<Arg> args;
      size_t next = 0;
      auto translate = [&](auto&& self, const Arg& arg) -> Arg {
        if (arg.is_list()) {
          Arg::List list;
          for (const Arg& e : arg.list()) list.push_back(self(self, e));
          return list;
        }
        if (!arg.is_value()) return arg;
        const at::Tensor& tensor = inputs.at(next++);
        if (auto it = twins.find(arg.value()); it != twins.end()) return it->second;
        given.emplace_back(tensor);
        return twins[arg.value()] = one.placeholder("p", arg.value()->meta())->result();
      };
      for (const Arg& arg : node->args()) args.push_back(translate(translate, arg));
      std::vector<int32_t> sizes;
      for (int32_t n : node->result_layout()) {
        if (n >= 0) sizes.push_back(n);
      }
      Node* twin = one.call(node->op(), args, sizes);
      std::vector<Arg> outputs;
      for (Value* r : twin->results()) outputs.emplace_back(r);
      one.output(outputs);
      auto results = Plan(one, state_).run(given);
      for (size_t i = 0; i < results.size(); ++i) {
        if (results[i].toTensor().numel() > 1024) throw Error(ErrorKind::InvalidArgument, "larger than a test needs");
      }
      for (size_t i = 0; i < results.size(); ++i) {
        node->result(i)->set_meta(TensorMeta::of(results[i].toTensor()));
        add(node->result(i), results[i].toTensor());
      }
      return true;
    } catch (const std::exception&) {
      graph.erase(node);
      return false;
    }
  }

  bool call(Graph& graph, const char* op, std::vector<Arg> args, const std::vector<at::Tensor>& inputs,
            std::vector<int32_t> sizes = {}) {
    Node* node = graph.call(op, std::move(args), std::move(sizes));
    if (options_.no_grad && chance(0.05)) node->meta().grad_enabled = false;
    return keep(graph, node, inputs);
  }

  void step(Graph& graph) {
    const double kind = static_cast<double>(below(100));
    if (kind < 25 && options_.views) return view(graph);
    if (kind < 45 && options_.writes) return write(graph);
    if (kind < 58 && options_.copies) return again(graph);
    if (kind < 62 && options_.copies) return constant(graph);
    pure(graph);
  }

  void pure(Graph& graph) {
    const Entry a = pick();
    // Nothing here saves its result: a later write to it would make the backward fail.
    static const char* kUnary[] = {"aten::sin", "aten::neg", "aten::cos", "aten::atan", "aten::silu", "aten::abs"};
    switch (below(8)) {
      case 0:
      case 1: call(graph, kUnary[below(6)], {a.value}, {a.tensor}); return;
      case 2: {
        const Entry* b = pick_like(a);
        if (!b) return;
        static const char* kBinary[] = {"aten::add.Tensor", "aten::sub.Tensor"};
        call(graph, kBinary[below(2)], {a.value, b->value}, {a.tensor, b->tensor});
        return;
      }
      case 3: call(graph, "aten::mul.Tensor", {a.value, 0.25 * static_cast<double>(below(7))}, {a.tensor}); return;
      case 4: {
        const Entry *x = pick_matrix(), *y = pick_matrix();
        if (x && y) call(graph, "aten::matmul", {x->value, y->value}, {x->tensor, y->tensor});
        return;
      }
      case 5: {
        const Entry* b = pick_like(a);
        if (b) call(graph, "aten::cat", {Arg::List{a.value, b->value, a.value}}, {a.tensor, b->tensor, a.tensor});
        return;
      }
      case 6:
        if (options_.random) call(graph, "aten::dropout", {a.value, 0.25, chance(0.7)}, {a.tensor});
        return;
      default: {
        // A linear in pieces, mostly of a parameter.
        const Entry *chosen = pick_matrix(), *matrix = pick_matrix();
        if (!chosen || !matrix) return;
        const Entry x = *chosen;
        Entry w = *matrix;
        for (const Entry& e : pool_) {
          if (e.value->producer()->target() == "b.weight" && chance(0.8)) w = e;
        }
        if (!call(graph, "aten::t", {w.value}, {w.tensor})) return;
        const Entry t = pool_.back();
        call(graph, chance(0.5) ? "aten::mm" : "aten::matmul", {x.value, t.value}, {x.tensor, t.tensor});
      }
    }
  }

  void view(Graph& graph) {
    const Entry a = pick();
    const int64_t dims = a.tensor.dim();
    if (dims == 0 || a.tensor.numel() == 0) return;
    const auto dim = static_cast<int64_t>(below(static_cast<size_t>(dims)));
    const int64_t size = a.tensor.size(dim);
    const auto at = static_cast<int64_t>(below(static_cast<size_t>(size)));
    switch (below(9)) {
      case 0:
      case 1: call(graph, "aten::select.int", {a.value, dim, at}, {a.tensor}); return;
      case 2:
      case 3:
        call(graph, "aten::slice.Tensor", {a.value, dim, at, size, 1 + static_cast<int64_t>(below(2))}, {a.tensor});
        return;
      case 4: call(graph, "aten::transpose.int", {a.value, dim, 0}, {a.tensor}); return;
      case 5: call(graph, "aten::narrow", {a.value, dim, at, size - at}, {a.tensor}); return;
      case 6:
        if (dims >= 2) call(graph, "aten::diagonal", {a.value}, {a.tensor});
        return;
      case 7: call(graph, "aten::unbind.int", {a.value, dim}, {a.tensor}, {static_cast<int32_t>(size)}); return;
      default: call(graph, "aten::reshape", {a.value, c10::IValue(std::vector<int64_t>{-1})}, {a.tensor}); return;
    }
  }

  void write(Graph& graph) {
    const Entry a = pick();
    switch (below(6)) {
      case 0: call(graph, "aten::mul_.Tensor", {a.value, 0.5}, {a.tensor}); return;
      case 1: call(graph, "aten::fill_.Scalar", {a.value, 0.75}, {a.tensor}); return;
      case 2: call(graph, "aten::neg_", {a.value}, {a.tensor}); return;
      case 3: call(graph, "aten::sin_", {a.value}, {a.tensor}); return;
      default: {
        const Entry* b = pick_like(a);
        if (!b) return;
        const Entry other = *b;
        call(graph, chance(0.5) ? "aten::add_.Tensor" : "aten::copy_", {a.value, other.value},
             {a.tensor, other.tensor});
      }
    }
  }

  // Adds a copy of a node.
  void again(Graph& graph) {
    const Entry a = pick();
    const Node* node = a.value->producer();
    if (!node->is_call() || node->num_inputs() != 1 || node->result_layout() != std::vector<int32_t>{-1} ||
        node->writes())
      return;
    for (const Entry& e : std::vector<Entry>(pool_)) {
      if (e.value != node->input(0)) continue;
      Node* copy = graph.call(node->op(), std::vector<Arg>(node->args().begin(), node->args().end()));
      copy->meta().grad_enabled = node->meta().grad_enabled;
      keep(graph, copy, {e.tensor});
      return;
    }
  }

  void constant(Graph& graph) {
    switch (below(3)) {
      case 0: call(graph, "aten::ones", {c10::IValue(std::vector<int64_t>{4, 4})}, {}); return;
      case 1: call(graph, "aten::full", {c10::IValue(std::vector<int64_t>{4}), 1.5}, {}); return;
      default: call(graph, "aten::arange", {4}, {}); return;
    }
  }

  std::mt19937_64 rng_;
  RandomGraphOptions options_;
  State state_;
  State initial_;  // before any node has run
  std::vector<Entry> pool_;
};

}  // namespace

// A write to what an earlier node saved for its backward is an error only when the backward runs.
static bool runs(const GraphModule& module) {
  try {
    auto copy = module.deep_copy();
    std::vector<c10::IValue> inputs;
    for (const Node* node : module.graph().placeholders()) {
      inputs.emplace_back(at::ones(node->result()->meta()->sizes).set_requires_grad(true).clone());
    }
    at::Tensor sum;
    for (const c10::IValue& v : copy->run(inputs)) {
      if (!v.isTensor() || !v.toTensor().requires_grad()) continue;
      sum = sum.defined() ? sum + v.toTensor().sum() : v.toTensor().sum();
    }
    if (sum.defined()) sum.backward();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

GraphModule random_graph(uint64_t seed, const RandomGraphOptions& options) {
  // Random numbers drawn by the nodes must not change the caller's generator.
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  at::Tensor saved = shared.get_state();
  at::manual_seed(seed);
  RandomGraphOptions now = options;
  for (uint64_t attempt = 0;; ++attempt) {
    now.writes = options.writes && attempt < 20;
    GraphModule module = Maker(seed + attempt * 0x9e3779b97f4a7c15ull, now).make();
    if (!runs(module)) continue;
    shared.set_state(saved);
    return module;
  }
}

}  // namespace plumb
