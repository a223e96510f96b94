// Graphs for the tests of this room.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <random>
#include <string>

#include "plumb/graph/graph_module.h"

namespace plumb::testing_models {

inline std::shared_ptr<GraphModule> module_of(const std::string& text, State state = {}) {
  Graph graph = parse_graph(text);
  const size_t outputs = graph.output_node()->args().size();
  TreeSpec in = TreeSpec::positional_inputs(graph.placeholders().size());
  TreeSpec out = outputs == 1 ? TreeSpec::leaf() : TreeSpec::tuple(std::vector<TreeSpec>(outputs));
  return std::make_shared<GraphModule>(std::move(graph), std::move(state), std::move(in), std::move(out));
}

inline void parameter(State& state, const std::string& name, at::Tensor value) {
  state.add({name, AttrKind::Parameter, value.set_requires_grad(true)});
}

struct GptConfig {
  int64_t layers = 2, width = 64, heads = 4, length = 32, batch = 8, vocabulary = 96;
  bool tied = true;
};

// A decoder with `tok + pos`, pre-norm blocks and a causal loss, with weights as PyTorch starts them.
// Inputs: ids, targets (i64). Outputs: loss, logits.
inline std::shared_ptr<GraphModule> gpt(const GptConfig& c = {}) {
  State state;
  const std::string b = std::to_string(c.batch), t = std::to_string(c.length), w = std::to_string(c.width),
                    h = std::to_string(c.heads), d = std::to_string(c.width / c.heads),
                    v = std::to_string(c.vocabulary);
  auto uniform = [](at::IntArrayRef sizes, int64_t fan_in) {
    return (at::rand(sizes) * 2 - 1) / std::sqrt(double(fan_in));
  };
  std::string text = "graph {\n  %ids: i64[" + b + ", " + t + "] = placeholder \"ids\"\n  %targets: i64[" + b + ", " +
                     t + "] = placeholder \"targets\"\n";
  auto attr = [&](const std::string& name) {
    std::string id = name;
    for (char& ch : id) {
      if (ch == '.') ch = '_';
    }
    text += "  %" + id + " = get_attr \"" + name + "\"\n";
    return "%" + id;
  };
  auto line = [&](const std::string& s) { text += "  " + s + "\n"; };
  auto linear = [&](const std::string& name, int64_t in, int64_t out, const std::string& x, const std::string& y) {
    parameter(state, name + ".weight", uniform({out, in}, in));
    parameter(state, name + ".bias", uniform({out}, in));
    const std::string weight = attr(name + ".weight"), bias = attr(name + ".bias");
    line(y + " = aten::linear(" + x + ", " + weight + ", " + bias + ") in \"\":\"Gpt\" \"" + name + "\":\"Linear\"");
  };
  auto norm = [&](const std::string& name, const std::string& x, const std::string& y) {
    parameter(state, name + ".weight", at::ones({c.width}));
    parameter(state, name + ".bias", at::zeros({c.width}));
    const std::string weight = attr(name + ".weight"), bias = attr(name + ".bias");
    line(y + " = aten::layer_norm(" + x + ", [" + w + "], " + weight + ", " + bias + ") in \"\":\"Gpt\" \"" + name +
         "\":\"LayerNorm\"");
  };
  parameter(state, "wte.weight", at::randn({c.vocabulary, c.width}) * 0.02);
  parameter(state, "wpe.weight", at::randn({c.length, c.width}) * 0.02);
  state.add({"positions", AttrKind::Buffer, at::arange(c.length)});
  const std::string wte = attr("wte.weight"), wpe = attr("wpe.weight"), positions = attr("positions");
  line("%tok = aten::embedding(" + wte + ", %ids)");
  line("%pos = aten::embedding(" + wpe + ", " + positions + ")");
  line("%x0 = aten::add.Tensor(%tok, %pos)");
  std::string x = "%x0";
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string n = std::to_string(i), p = "h." + n + ".";
    auto id = [&](const char* name) { return "%" + std::string(name) + n; };
    norm(p + "ln_1", x, id("ln1_"));
    linear(p + "attn.qkv", c.width, 3 * c.width, id("ln1_"), id("qkv"));
    line("[" + id("q") + ", " + id("k") + ", " + id("v") + "] = aten::chunk(" + id("qkv") + ", 3, -1)");
    for (const char* name : {"q", "k", "v"}) {
      line(id(name) + "v = aten::view(" + id(name) + ", [" + b + ", " + t + ", " + h + ", " + d + "])");
      line(id(name) + "h = aten::transpose.int(" + id(name) + "v, 1, 2)");
    }
    line(id("att") + " = aten::scaled_dot_product_attention(" + id("q") + "h, " + id("k") + "h, " + id("v") +
         "h, None, 0.0, True)");
    line(id("att_t") + " = aten::transpose.int(" + id("att") + ", 1, 2)");
    line(id("att_r") + " = aten::reshape(" + id("att_t") + ", [" + b + ", " + t + ", " + w + "])");
    linear(p + "attn.out", c.width, c.width, id("att_r"), id("proj"));
    line(id("mid") + " = aten::add.Tensor(" + x + ", " + id("proj") + ")");
    norm(p + "ln_2", id("mid"), id("ln2_"));
    linear(p + "mlp.up", c.width, 4 * c.width, id("ln2_"), id("up"));
    line(id("act") + " = aten::gelu(" + id("up") + ")");
    linear(p + "mlp.down", 4 * c.width, c.width, id("act"), id("down"));
    line(id("y") + " = aten::add.Tensor(" + id("mid") + ", " + id("down") + ")");
    x = id("y");
  }
  norm("ln_f", x, "%normed");
  if (c.tied) {
    line("%logits = aten::linear(%normed, " + wte + ")");
  } else {
    linear("head", c.width, c.vocabulary, "%normed", "%logits");
  }
  line("%flat = aten::view(%logits, [" + std::to_string(c.batch * c.length) + ", " + v + "])");
  line("%flat_targets = aten::view(%targets, [" + std::to_string(c.batch * c.length) + "])");
  line("%loss = aten::cross_entropy_loss(%flat, %flat_targets)");
  line("output(%loss, %logits)");
  return module_of(text + "}\n", std::move(state));
}

inline std::vector<c10::IValue> gpt_inputs(const GptConfig& c = {}) {
  return {at::randint(c.vocabulary, {c.batch, c.length}), at::randint(c.vocabulary, {c.batch, c.length})};
}

// A program of adds, products, softmaxes, chunks and shapes, whose operands are mostly among the last `reach` values.
inline Graph random_graph(std::mt19937& random, int nodes, int reach) {
  Graph graph;
  std::vector<Value*> values;
  for (int i = 0; i < 2; ++i) values.push_back(graph.placeholder("x")->result());
  auto pick = [&] {
    const int n = static_cast<int>(values.size());
    const int back = random() % 4 == 0 ? n : std::min(n, reach);
    return values[static_cast<size_t>(n - 1 - static_cast<int>(random() % static_cast<unsigned>(back)))];
  };
  for (int i = 0; i < nodes; ++i) {
    switch (random() % 9) {
      case 0: values.push_back(graph.call("aten::softmax.int", {pick(), -1})->result()); break;
      case 1: {
        Node* chunk = graph.call("aten::chunk", {pick(), 2, -1}, {2});
        values.push_back(chunk->result(0));
        values.push_back(chunk->result(1));
        break;
      }
      case 2: values.push_back(graph.call("aten::mul.Tensor", {pick(), pick()})->result()); break;
      case 3: values.push_back(graph.call("aten::zeros_like", {pick()})->result()); break;
      case 4: values.push_back(graph.get_attr("w" + std::to_string(i))->result()); break;
      case 5: values.push_back(graph.call("aten::relu", {pick()})->result()); break;
      default: values.push_back(graph.call("aten::add.Tensor", {pick(), pick()})->result());
    }
  }
  graph.output({values.back()});
  return graph;
}

}  // namespace plumb::testing_models
