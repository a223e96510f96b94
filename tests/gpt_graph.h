// The GPT of examples/gpt.h as a graph's text, with what no capture of C++ gives it: module stacks, marks to cut at.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "plumb/graph/graph_module.h"
#include "tests/test_device.h"

namespace plumb::testing_models {

inline std::shared_ptr<GraphModule> module_of(const std::string& text, State state = {}) {
  Graph graph = parse_graph(text);
  const size_t outputs = graph.output_node()->args().size();
  TreeSpec in = TreeSpec::positional_inputs(graph.placeholders().size());
  TreeSpec out = outputs == 1 ? TreeSpec::leaf() : TreeSpec::tuple(std::vector<TreeSpec>(outputs));
  auto module = std::make_shared<GraphModule>(std::move(graph), std::move(state), std::move(in), std::move(out));
  move_there(*module);
  return module;
}

inline void parameter(State& state, const std::string& name, at::Tensor value) {
  state.add({name, AttrKind::Parameter, value.set_requires_grad(true)});
}

struct GptConfig {
  int64_t layers = 2, width = 64, heads = 4, length = 32, batch = 8, vocabulary = 96;
  bool tied = true;      // the head's weight is the embedding's, under both names
  bool stacks = true;    // nodes know their modules
  bool marks = false;    // before every block but the first, and before the head
  double dropout = 0.0;  // dropout probability of both branches
};

// Weights as PyTorch starts them. Inputs: ids, targets (i64). Outputs: loss, logits.
inline std::shared_ptr<GraphModule> gpt(const GptConfig& c = {}) {
  State state;
  std::string text = "graph {\n";
  auto sizes = [](std::initializer_list<int64_t> list) {
    std::string joined;
    for (int64_t n : list) joined += (joined.empty() ? "[" : ", ") + std::to_string(n);
    return joined + "]";
  };
  auto line = [&](const std::string& node, const std::string& path = "", const std::string& type = "") {
    text +=
        "  " + node + (c.stacks ? " in \"\":\"GPT\"" + (path.empty() ? "" : " \"" + path + "\":\"" + type + "\"") : "");
    text += "\n";
  };
  auto uniform = [](at::IntArrayRef shape, int64_t fan_in) {
    return (at::rand(shape) * 2 - 1) / std::sqrt(double(fan_in));
  };
  auto attribute = [&](const std::string& name) {
    std::string id = "%" + name;
    std::replace(id.begin(), id.end(), '.', '_');
    text += "  " + id + " = get_attr \"" + name + "\"\n";
    return id;
  };
  auto linear = [&](const std::string& name, int64_t in, int64_t out, const std::string& x, const std::string& y) {
    parameter(state, name + ".weight", uniform({out, in}, in));
    parameter(state, name + ".bias", uniform({out}, in));
    const std::string weight = attribute(name + ".weight"), bias = attribute(name + ".bias");
    line(y + " = aten::linear(" + x + ", " + weight + ", " + bias + ")", name, "Linear");
  };
  auto norm = [&](const std::string& name, const std::string& x, const std::string& y) {
    parameter(state, name + ".weight", at::ones({c.width}));
    parameter(state, name + ".bias", at::zeros({c.width}));
    const std::string weight = attribute(name + ".weight"), bias = attribute(name + ".bias");
    line(y + " = aten::layer_norm(" + x + ", " + sizes({c.width}) + ", " + weight + ", " + bias + ")", name,
         "LayerNorm");
  };
  for (const char* input : {"ids", "targets"})
    text += std::string("  %") + input + ": i64" + sizes({c.batch, c.length}) + " = placeholder \"" + input + "\"\n";
  parameter(state, "tok.weight", at::randn({c.vocabulary, c.width}) * 0.02);
  parameter(state, "pos.weight", at::randn({c.length, c.width}) * 0.02);
  const std::string words = attribute("tok.weight"), places = attribute("pos.weight");
  line("%tok = aten::embedding(" + words + ", %ids)", "tok", "Embedding");
  line("%n: int = aten::sym_size.int(%ids, 1)");
  line("%places = aten::arange(%n)");
  line("%pos = aten::embedding(" + places + ", %places)", "pos", "Embedding");
  line("%x0 = aten::add.Tensor(%tok, %pos)");
  std::string x = "%x0";
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string n = std::to_string(i), path = "blocks." + n;
    auto id = [&](const char* name) { return "%" + std::string(name) + n; };
    auto in_block = [&](const std::string& node) { line(node, path, "Block"); };
    // Ends a branch: the residual add, behind dropout if there is any.
    auto add = [&](const std::string& skip, std::string branch, const std::string& sum) {
      if (c.dropout > 0) {
        in_block(branch + "_dropped = aten::dropout(" + branch + ", " + std::to_string(c.dropout) + ", True)");
        branch += "_dropped";
      }
      in_block(sum + " = aten::add.Tensor(" + skip + ", " + branch + ")");
    };
    if (c.marks && i > 0) line("plumb::pipe_split()");
    norm(path + ".ln1", x, id("ln1_"));
    linear(path + ".qkv", c.width, 3 * c.width, id("ln1_"), id("qkv"));
    in_block("[" + id("q") + ", " + id("k") + ", " + id("v") + "] = aten::chunk(" + id("qkv") + ", 3, -1)");
    for (const char* part : {"q", "k", "v"}) {
      in_block(id(part) + "v = aten::view(" + id(part) + ", " + sizes({c.batch, c.length, c.heads, c.width / c.heads}) +
               ")");
      in_block(id(part) + "h: f32" + sizes({c.batch, c.heads, c.length, c.width / c.heads}) +
               " = aten::transpose.int(" + id(part) + "v, 1, 2)");
    }
    in_block(id("att") + " = aten::scaled_dot_product_attention(" + id("q") + "h, " + id("k") + "h, " + id("v") +
             "h, None, 0.0, True)");
    in_block(id("att_t") + " = aten::transpose.int(" + id("att") + ", 1, 2)");
    in_block(id("att_r") + " = aten::reshape(" + id("att_t") + ", " + sizes({c.batch, c.length, c.width}) + ")");
    linear(path + ".proj", c.width, c.width, id("att_r"), id("proj"));
    add(x, id("proj"), id("mid"));
    norm(path + ".ln2", id("mid"), id("ln2_"));
    linear(path + ".up", c.width, 4 * c.width, id("ln2_"), id("up"));
    in_block(id("act") + " = aten::gelu(" + id("up") + ")");
    linear(path + ".down", 4 * c.width, c.width, id("act"), id("down"));
    add(id("mid"), id("down"), id("y"));
    x = id("y");
  }
  if (c.marks) line("plumb::pipe_split()");
  norm("ln", x, "%normed");
  if (c.tied) {
    state.add({"head.weight", AttrKind::Parameter, state.get("tok.weight").tensor});
  } else {
    parameter(state, "head.weight", uniform({c.vocabulary, c.width}, c.width));
  }
  line("%logits = aten::linear(%normed, " + attribute("head.weight") + ")", "head", "Linear");
  line("%flat = aten::view(%logits, " + sizes({c.batch * c.length, c.vocabulary}) + ")");
  line("%flat_targets = aten::view(%targets, " + sizes({c.batch * c.length}) + ")");
  line("%loss = aten::cross_entropy_loss(%flat, %flat_targets)");
  return module_of(text + "  output(%loss, %logits)\n}\n", std::move(state));
}

inline std::vector<c10::IValue> gpt_inputs(const GptConfig& c = {}) {
  return {there(at::randint(c.vocabulary, {c.batch, c.length})), there(at::randint(c.vocabulary, {c.batch, c.length}))};
}

}  // namespace plumb::testing_models
