// The parts of execution_bench.py that Python cannot do: loops of C++ eager, every allocation of a step counted, and
// the times of the graph's own work on large graphs. A library that the script loads, so that all is measured in turn
// in one process.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/profiler.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>

#include "benchmarks/measure.h"
#include "plumb/graph/graph_module.h"
#include "plumb/graph/pass.h"

namespace {

plumb::TensorMeta f32(std::vector<int64_t> sizes) {
  plumb::TensorMeta meta;
  meta.strides = plumb::contiguous_strides(sizes);
  meta.sizes = std::move(sizes);
  return meta;
}

// Blocks of what real graphs have: linear layers, also spelled as t + matmul + add_, views, equal nodes, dead nodes,
// numbers to fold.
plumb::GraphModule large_graph(int64_t nodes) {
  using plumb::Value;
  plumb::Graph g;
  plumb::State state;
  const at::Tensor weight = at::zeros({8, 8}), bias = at::zeros({8});
  const auto shape = f32({4, 8});
  auto call = [&](const char* op, std::vector<plumb::Arg> args, std::vector<int64_t> sizes = {4, 8}) {
    Value* v = g.call(op, std::move(args))->result();
    v->set_meta(f32(std::move(sizes)));
    return v;
  };
  Value* x = g.placeholder("x", shape)->result();
  for (int64_t i = 0; int64_t(g.size()) + 1 < nodes; ++i) {
    const std::string name = "layers." + std::to_string(i);
    state.add({name + ".weight", plumb::AttrKind::Parameter, weight});
    state.add({name + ".bias", plumb::AttrKind::Parameter, bias});
    Value* w = g.get_attr(name + ".weight", f32({8, 8}))->result();
    Value* b = g.get_attr(name + ".bias", f32({8}))->result();
    Value* h = call("aten::linear", {x, w, b});
    h = call("aten::gelu", {h});
    Value* again = call("aten::gelu", {call("aten::linear", {x, w, b})});
    call("aten::relu", {h});
    Value* t = call("aten::t", {w}, {8, 8});
    Value* m = call("aten::matmul", {h, t});
    m = call("aten::add_.Tensor", {m, b});
    Value* number = call("aten::exp", {call("aten::full", {c10::IValue(std::vector<int64_t>{8}), 0.5}, {8})}, {8});
    m = call("aten::mul.Tensor", {m, number});
    x = call("aten::add.Tensor", {call("aten::add.Tensor", {x, m}), again});
  }
  g.output({x});
  return plumb::GraphModule(std::move(g), std::move(state), plumb::TreeSpec::positional_inputs(1),
                            plumb::TreeSpec::leaf());
}

}  // namespace

extern "C" {

// x = at::mul(x, 1.0001) `nodes` times on 16 floats, best of `rounds`: seconds a node.
// mode 0: no grad; 1: recording; 2: recording and backward.
double eager_chain(int64_t nodes, int64_t rounds, int mode) {
  at::AutoGradMode grad(mode > 0);
  const at::Tensor start = at::ones({16}).set_requires_grad(mode > 0), seed = at::ones({16});
  double best = 1e9;
  for (int64_t r = 0; r < rounds; ++r) {
    const double begin = thread_seconds();
    at::Tensor x = start;
    for (int64_t i = 0; i < nodes; ++i) x = at::mul(x, 1.0001);
    if (mode == 2) x.backward(seed);
    best = std::min(best, thread_seconds() - begin);
    start.mutable_grad() = at::Tensor();
  }
  return best / double(nodes);
}

// "what seconds\n" for everything that is done with a graph of about so many nodes, best of `rounds`. Returns the
// number of nodes, or -1 with the error in `out`.
int64_t graph_work(int64_t nodes, int64_t rounds, char* out, int64_t size) try {
  std::vector<std::pair<std::string, double>> rows;
  auto timed = [&](const std::string& name, const std::function<void()>& work) {
    const double begin = thread_seconds();
    work();
    const double seconds = thread_seconds() - begin;
    auto known = std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return row.first == name; });
    if (known == rows.end())
      rows.emplace_back(name, seconds);
    else
      known->second = std::min(known->second, seconds);
  };
  int64_t count = 0;
  for (int64_t r = 0; r < rounds; ++r) {
    std::unique_ptr<plumb::GraphModule> module;
    timed("build", [&] { module = std::make_unique<plumb::GraphModule>(large_graph(nodes)); });
    const plumb::Graph& graph = module->graph();
    count = int64_t(graph.size());
    std::string text;
    timed("lint", [&] { plumb::lint(graph); });
    timed("hash", [&] { (void)graph.hash(); });
    timed("print", [&] { text = plumb::to_string(graph); });
    timed("parse", [&] { (void)plumb::parse_graph(text); });
    timed("compile the plan", [&] { plumb::Plan(graph, module->state()); });
    for (const plumb::Pass* pass : plumb::all_passes()) {
      plumb::GraphModule copy(graph.clone(), module->state(), module->in_spec(), module->out_spec());
      timed("pass " + pass->name, [&] { plumb::run_pass(*pass, copy, {}, nullptr, false); });
    }
  }
  std::string all;
  for (const auto& [name, seconds] : rows) all += name + "\t" + std::to_string(seconds) + "\n";
  std::snprintf(out, size_t(size), "%s", all.c_str());
  return count;
} catch (const std::exception& e) {
  std::snprintf(out, size_t(size), "%s", e.what());
  return -1;
}
}
