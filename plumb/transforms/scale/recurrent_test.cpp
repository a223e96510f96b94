#include "plumb/transforms/scale/recurrent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "plumb/scaling/rules_recurrent.h"
#include "plumb/transforms/scale/unit_scale_testing.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing_models::module_of;
using testing_models::parameter;
using testing_unit_scale::rms;

struct Case {
  std::string name, op;
  int64_t gates;
  bool memory;
};

// Shapes (steps, batch, in) -> (steps, batch, hidden).
constexpr int64_t kSteps = 24, kBatch = 32, kIn = 96, kHidden = 128;

std::string size(std::initializer_list<int64_t> sizes) {
  std::string text = "f32[";
  for (int64_t s : sizes) text += (text.back() == '[' ? "" : ", ") + std::to_string(s);
  return text + "]";
}

std::shared_ptr<GraphModule> layers(const Case& c, int64_t num_layers) {
  State state;
  std::string names, lines;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const std::string l = std::to_string(layer);
    const int64_t rows = c.gates * kHidden;
    parameter(state, "w_ih" + l, rand_there({rows, layer ? kHidden : kIn}) * 0.1 - 0.05);
    parameter(state, "w_hh" + l, rand_there({rows, kHidden}) * 0.1 - 0.05);
    parameter(state, "b_ih" + l, rand_there({rows}) * 0.1);
    parameter(state, "b_hh" + l, rand_there({rows}) * 0.1);
    for (const char* p : {"w_ih", "w_hh", "b_ih", "b_hh"}) {
      lines += " %" + (p + l) + " = get_attr \"" + p + l + "\"";
      names += (names.empty() ? "%" : ", %") + (p + l);
      lines += "\n";
    }
  }
  const std::string state_type = size({num_layers, kBatch, kHidden});
  std::string text = "graph { %x: " + size({kSteps, kBatch, kIn}) + " = placeholder \"x\"\n" + lines +
                     " %h: " + state_type + " = aten::zeros([" + std::to_string(num_layers) + ", 32, 128])\n %y" +
                     (c.memory ? ", %hn, %cn" : ", %hn") + " = " + c.op + ".input(%x, " +
                     (c.memory ? "[%h, %h]" : "%h") + ", [" + names + "], True, " + std::to_string(num_layers) +
                     ", 0.0, False, False, False) output(%y) }";
  return module_of(text, std::move(state));
}

struct Measured {
  at::Tensor output, input_gradient;
  std::shared_ptr<TransformedModule> module;
};

Measured train_once(const std::shared_ptr<GraphModule>& module) {
  Measured m;
  m.module = unit_scale(module);
  at::Tensor x = randn_there({kSteps, kBatch, kIn}).requires_grad_();
  m.output = (*m.module)(x);
  m.output.backward(at::randn_like(m.output));
  m.input_gradient = x.grad();
  return m;
}

class Recurrent : public testing::TestWithParam<Case> {};

TEST_P(Recurrent, LayersKeepUnitScale) {
  at::manual_seed(1);
  const Measured m = train_once(layers(GetParam(), 1));
  EXPECT_NEAR(rms(m.output), 1, 0.12);
  EXPECT_NEAR(rms(m.input_gradient), 1, 0.2);
  for (const char* name : {"w_ih0", "w_hh0", "b_ih0", "b_hh0"}) {
    const at::Tensor& parameter = m.module->state().get(name).tensor;
    EXPECT_NEAR(rms(parameter), name[0] == 'w' ? 1 : 0, 0.01) << name;
    EXPECT_NEAR(rms(parameter.grad()), 1, 0.25) << name;
  }
}

// The input of an upper layer is alike from step to step, which adds up in memory beyond the rule.
TEST_P(Recurrent, StackedLayersStayNearUnitScale) {
  at::manual_seed(1);
  const Measured m = train_once(layers(GetParam(), 3));
  EXPECT_NEAR(rms(m.output), 1, 0.5);
  EXPECT_NEAR(rms(m.input_gradient), 1, 0.75);
  for (const char* layer : {"0", "1", "2"})
    EXPECT_NEAR(rms(m.module->state().get("w_ih" + std::string(layer)).tensor.grad()), 1, 0.75) << layer;
}

TEST_P(Recurrent, TheReportSaysWhatBecameOfIt) {
  const auto scaled = unit_scale(layers(GetParam(), 1));
  const Report& report = scaled->reports.back();
  ASSERT_NE(report.find(ReportKind::Replaced, "y"), nullptr) << report.to_text();
  EXPECT_THAT(report.find(ReportKind::Replaced, "y")->reason, HasSubstr("unit-scaled weights"));
  EXPECT_EQ(report.count(ReportKind::Weight), 2u);
  EXPECT_EQ(report.count(ReportKind::Bias), 2u);
}

TEST_P(Recurrent, ASecondTransformLeavesTheFactorsAlone) {
  const auto once = unit_scale(layers(GetParam(), 1)), twice = unit_scale(once);
  EXPECT_EQ(to_string(once->graph()), to_string(twice->graph()));
  EXPECT_THAT(twice->reports.back().find(ReportKind::LeftAlone, "y")->reason, HasSubstr("factors already"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, Recurrent,
                         testing::Values(Case{"lstm", "aten::lstm", 4, true}, Case{"gru", "aten::gru", 3, false},
                                         Case{"tanh", "aten::rnn_tanh", 1, false},
                                         Case{"relu", "aten::rnn_relu", 1, false}),
                         [](const auto& info) { return info.param.name; });

TEST(RecurrentCells, CalledStepByStepAreLikeALayer) {
  at::manual_seed(1);
  State state;
  parameter(state, "w_ih", randn_there({4 * kHidden, kIn}));
  parameter(state, "w_hh", randn_there({4 * kHidden, kHidden}));
  std::string text =
      "graph { %x: f32[6, 32, 96] = placeholder \"x\" %a = get_attr \"w_ih\" %b = get_attr \"w_hh\"\n"
      "%h0: f32[32, 128] = aten::zeros([32, 128])\n";
  std::string together = text, h = "%h0", c = "%h0", outputs;
  for (int i = 1; i <= 6; ++i) {
    const std::string n = std::to_string(i);
    text += "%x" + n + ": f32[32, 96] = aten::select.int(%x, 0, " + std::to_string(i - 1) + ")\n%h" + n +
            ": f32[32, 128], %c" + n + ": f32[32, 128] = aten::lstm_cell(%x" + n + ", [" + h + ", " + c +
            "], %a, %b)\n";
    h = "%h" + n, c = "%c" + n;
    outputs += (outputs.empty() ? "" : ", ") + h;
  }
  text += "%y = aten::stack([" + outputs + "]) output(%y) }";
  together +=
      "%l: f32[1, 32, 128] = aten::unsqueeze(%h0, 0)\n%y, %hn, %cn = aten::lstm.input(%x, [%l, %l], [%a, %b], "
      "False, 1, 0.0, False, False, False) output(%y) }";
  const auto cells = unit_scale(module_of(text, state)), layer = unit_scale(module_of(together, state));
  const at::Tensor x = randn_there({6, 32, 96});
  const at::Tensor y = (*cells)(x), z = (*layer)(x);
  EXPECT_TRUE(at::allclose(y, z, 1e-4, 1e-5)) << rms(y - z);
  y.backward(at::ones_like(y));
  z.backward(at::ones_like(z));
  for (const char* name : {"w_ih", "w_hh"})
    EXPECT_TRUE(
        at::allclose(cells->state().get(name).tensor.grad(), layer->state().get(name).tensor.grad(), 1e-3, 1e-3))
        << name;
}

TEST(RecurrentCells, ProjectedStatesAreLeftAloneWithTheirWeights) {
  State state;
  parameter(state, "w_ih", randn_there({16, 4}) * 0.1);
  parameter(state, "w_hh", randn_there({16, 2}) * 0.1);
  parameter(state, "w_hr", randn_there({2, 4}) * 0.1);
  auto module = module_of(
      R"(graph { %x: f32[5, 2, 4] = placeholder "x" %h: f32[1, 2, 2] = placeholder "h" %k: f32[1, 2, 4] = placeholder "k"
      %a = get_attr "w_ih" %b = get_attr "w_hh" %c = get_attr "w_hr"
      %y, %hn, %cn = aten::lstm.input(%x, [%h, %k], [%a, %b, %c], False, 1, 0.0, False, False, False) output(%y) })",
      std::move(state));
  auto scaled = unit_scale(module);
  for (const Attr& attr : module->state())
    EXPECT_TRUE(at::equal(attr.tensor, scaled->state().get(attr.name).tensor)) << attr.name;
  EXPECT_THAT(scaled->reports.back().find(ReportKind::LeftAlone, "y")->reason, HasSubstr("projected"));
}

TEST(RecurrentRule, GradientsSettleToAFixedPoint) {
  for (auto layer : {RecurrentLayer::Lstm, RecurrentLayer::Gru, RecurrentLayer::Tanh}) {
    const auto one = rules::recurrent(layer, 1), many = rules::recurrent(layer, 1000),
               more = rules::recurrent(layer, 2000);
    EXPECT_GT(many.grad_input_gates, one.grad_input_gates);
    EXPECT_NEAR(many.grad_input_gates / more.grad_input_gates, 1, 0.01);
    EXPECT_EQ(one.hidden, many.hidden);
  }
}

}  // namespace
}  // namespace plumb
