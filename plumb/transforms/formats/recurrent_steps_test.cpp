#include "plumb/transforms/formats/recurrent_steps.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/module.h"

namespace plumb {
namespace {

using namespace testing_models;
using Tensors = std::vector<at::Tensor>;

struct Shape {
  const char* op;
  int64_t layers;
  bool bidirectional, batch_first, biases;
  int64_t projection;
};

std::string flag(bool b) { return b ? "True" : "False"; }

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "%" : ", %") + name;
  return "[" + text + "]";
}

// 7 steps, 3 sequences, 5 inputs, 4 hidden.
std::shared_ptr<GraphModule> layer(const Shape& s) {
  const std::string op = s.op;
  const bool lstm = op == "lstm";
  const int64_t gates = (lstm ? 4 : op == "gru" ? 3 : 1) * 4, directions = s.bidirectional ? 2 : 1;
  const int64_t out = s.projection ? s.projection : 4;
  State state;
  std::vector<std::string> names;
  std::string text =
      "graph {\n  %x: f32[" + std::string(s.batch_first ? "3, 7" : "7, 3") + ", 5] = placeholder \"x\"\n";
  const std::string rows = std::to_string(s.layers * directions);
  text += "  %h: f32[" + rows + ", 3, " + std::to_string(out) + "] = placeholder \"h\"\n";
  text += "  %c: f32[" + rows + ", 3, 4] = placeholder \"c\"\n";
  auto add = [&](at::IntArrayRef sizes) {
    const std::string name = "p" + std::to_string(names.size());
    parameter(state, name, randn_there(sizes) * 0.4);
    text += "  %" + name + " = get_attr \"" + name + "\"\n";
    names.push_back(name);
  };
  for (int64_t i = 0; i < s.layers * directions; ++i) {
    add({gates, i < directions ? 5 : out * directions});
    add({gates, out});
    if (s.biases) add({gates}), add({gates});
    if (s.projection) add({out, 4});
  }
  const std::string tail = list(names) + ", " + flag(s.biases) + ", " + std::to_string(s.layers) + ", 0.0, False, " +
                           flag(s.bidirectional) + ", " + flag(s.batch_first) + ")\n";
  if (lstm)
    text += "  %y, %hn, %cn = aten::lstm.input(%x, [%h, %c], " + tail + "  output(%y, %hn, %cn)\n}";
  else
    text += "  %y, %hn = aten::" + op + ".input(%x, %h, " + tail + "  output(%y, %hn)\n}";
  return module_of(text, std::move(state));
}

Tensors all_gradients(GraphModule& module, Tensors inputs) {
  Tensors wanted;
  for (at::Tensor& x : inputs) wanted.push_back(x = x.detach().requires_grad_());
  for (const Attr& attr : module.state()) wanted.push_back(attr.tensor);
  Tensors all, seeds;
  std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  for (const c10::IValue& v : module.run(std::move(values))) all.push_back(v.toTensor());
  at::manual_seed(4);
  for (const at::Tensor& y : all) seeds.push_back(randn_there(y.sizes()));
  for (const at::Tensor& g : torch::autograd::grad(all, wanted, seeds, std::nullopt, false, true))
    all.push_back(g.defined() ? g : zeros_there({}));
  return all;
}

TEST(RecurrentSteps, ComputeWhatTheFusedOperatorDoes) {
  at::manual_seed(1);
  for (const Shape& s : std::vector<Shape>{{"lstm", 1, false, false, true, 0},
                                           {"lstm", 2, true, true, true, 0},
                                           {"lstm", 2, true, false, false, 3},
                                           {"lstm", 1, false, true, true, 2},
                                           {"gru", 2, true, true, true, 0},
                                           {"gru", 1, false, false, false, 0},
                                           {"rnn_tanh", 2, true, false, true, 0},
                                           {"rnn_relu", 1, false, true, true, 0}}) {
    auto fused = layer(s);
    auto steps = derive(*fused);
    for (Node* node : steps->graph().nodes()) {
      if (!node->is_call()) continue;
      ASSERT_EQ(steps_obstacle(node, steps->state()), std::nullopt);
      const size_t each = s.projection ? 15 : 8, cells = static_cast<size_t>(s.layers * (s.bidirectional ? 2 : 1));
      EXPECT_EQ(take_apart(*steps, node).size(), cells * each);
      break;
    }
    steps->lint();
    const int64_t rows = s.layers * (s.bidirectional ? 2 : 1), out = s.projection ? s.projection : 4;
    Tensors inputs = {s.batch_first ? randn_there({3, 7, 5}) : randn_there({7, 3, 5}), randn_there({rows, 3, out}),
                      randn_there({rows, 3, 4})};
    const Tensors a = all_gradients(*fused, inputs), b = all_gradients(*steps, inputs);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-4, 1e-5)) << s.op << i;
  }
}

TEST(RecurrentSteps, DropBetweenLayersAsTheFusedOperatorDoes) {
  State state;
  for (const char* name : {"a", "b", "c", "d"}) parameter(state, name, randn_there({4, 4}));
  auto fused = module_of(R"(graph {
    %x: f32[7, 3, 4] = placeholder "x"
    %h: f32[2, 3, 4] = placeholder "h"
    %a = get_attr "a"
    %b = get_attr "b"
    %c = get_attr "c"
    %d = get_attr "d"
    %y, %hn = aten::rnn_tanh.input(%x, %h, [%a, %b, %c, %d], False, 2, 0.4, True, False, False)
    output(%y, %hn)
  })",
                         state);
  auto steps = derive(*fused);
  for (Node* node : steps->graph().nodes()) {
    if (!node->is_op("aten::rnn_tanh")) continue;
    take_apart(*steps, node);
    break;
  }
  const at::Tensor x = randn_there({7, 3, 4}), h = randn_there({2, 3, 4});
  at::manual_seed(8);
  const auto a = fused->run({x, h});
  at::manual_seed(8);
  const auto b = steps->run({x, h});
  EXPECT_TRUE(at::allclose(a[0].toTensor(), b[0].toTensor(), 1e-5, 1e-6));
}

TEST(RecurrentSteps, ComputeWhatACellDoes) {
  for (const char* op : {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}) {
    const std::string name = op;
    const int64_t gates = (name == "lstm_cell" ? 4 : name == "gru_cell" ? 3 : 1) * 4;
    State state;
    parameter(state, "a", randn_there({gates, 5}));
    parameter(state, "b", randn_there({gates, 4}));
    parameter(state, "u", randn_there({gates}));
    parameter(state, "v", randn_there({gates}));
    const bool lstm = name == "lstm_cell";
    auto fused = module_of(std::string(R"(graph {
      %x: f32[3, 5] = placeholder "x"
      %h: f32[3, 4] = placeholder "h"
      %c: f32[3, 4] = placeholder "c"
      %a = get_attr "a"
      %b = get_attr "b"
      %u = get_attr "u"
      %v = get_attr "v"
      )") + (lstm ? "%y, %z" : "%y") +
                               " = aten::" + name + "(%x, " + (lstm ? "[%h, %c]" : "%h") +
                               ", %a, %b, %u, %v)\n output(" + (lstm ? "%y, %z" : "%y") + ")\n}",
                           state);
    auto steps = derive(*fused);
    for (Node* node : steps->graph().nodes()) {
      if (!node->is_call()) continue;
      EXPECT_EQ(take_apart(*steps, node).size(), 2u);
      break;
    }
    steps->lint();
    const Tensors inputs = {randn_there({3, 5}), randn_there({3, 4}), randn_there({3, 4})};
    const Tensors a = all_gradients(*fused, inputs), b = all_gradients(*steps, inputs);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-4, 1e-5)) << op << i;
  }
}

}  // namespace
}  // namespace plumb
