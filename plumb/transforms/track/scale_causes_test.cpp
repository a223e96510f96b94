#include "plumb/transforms/track/scale_causes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A value with the standard deviations of itself and of its gradient; no gradient flows through it if that is 0.
ScaleNode node(const std::string& name, const std::string& target, std::vector<size_t> inputs, double fwd, double bwd) {
  ScaleNode made;
  made.name = name;
  made.target = target;
  made.inputs = std::move(inputs);
  if (made.inputs.empty()) made.kind = target == name ? NodeKind::Placeholder : NodeKind::GetAttr;
  auto data = [](double std) {
    Metrics::Data d;
    d.std = std;
    d.numel = 8;
    return d;
  };
  made.metrics.emplace().fwd = data(fwd);
  if (bwd) made.metrics->bwd = data(bwd);
  return made;
}

Report said(const std::string& name, const std::string& reason) {
  Report report("unit_scale");
  report.add({.kind = ReportKind::LeftAlone, .node = name, .reason = reason});
  return report;
}

TEST(ScaleCauses, NamesTheOperatorWhereGradientsShrink) {
  ScalesGraph graph;
  graph.nodes = {node("x", "x", {}, 1, 0.05), node("w", "linear.weight", {}, 1, 0.06),
                 node("l", "plumb::linear", {0, 1}, 1, 0.06), node("m", "aten::mul.Tensor", {2}, 0.06, 1),
                 node("n", "plumb::rms_norm", {3}, 1, 1)};
  const auto causes = scale_causes(graph, {said("m", "it multiplies by a number: 0.06")});
  ASSERT_EQ(causes.size(), 2u);
  EXPECT_TRUE(causes[0].gradients && causes[0].small);
  EXPECT_EQ(causes[0].target, "aten::mul.Tensor");
  EXPECT_EQ(causes[0].reason, "it multiplies by a number: 0.06");
  EXPECT_NEAR(causes[0].factor, 0.06, 1e-9);
  EXPECT_THAT(causes[0].nodes, ElementsAre("m"));
  EXPECT_THAT(causes[0].tensors, ElementsAre("x", "linear.weight", "l"));
  EXPECT_EQ(causes[0].least, 0.05);
  EXPECT_EQ(causes[0].most, 0.06);
  EXPECT_FALSE(causes[1].gradients);
  EXPECT_THAT(causes[1].tensors, ElementsAre("m"));
  EXPECT_THAT(to_text(causes), HasSubstr("3 gradients are small, std 0.05 to 0.06 (x, linear.weight, l): x 0.06 at 1 x "
                                         "aten::mul.Tensor (m): it multiplies by a number: 0.06"));
}

TEST(ScaleCauses, SaysWhatALossAndAnOperatorWithoutAFactorDo) {
  ScalesGraph graph;
  graph.nodes = {node("x", "x", {}, 1, 0), node("m", "aten::mul.Tensor", {0}, 9, 0.1),
                 node("output", "output", {1}, 1, 0)};
  graph.nodes[2].kind = NodeKind::Output;
  graph.nodes[2].metrics.reset();
  const std::string text = to_text(scale_causes(graph, {}));
  EXPECT_THAT(text, HasSubstr("at 1 x output (output): the loss gives gradients of this scale"));
  EXPECT_THAT(text, HasSubstr("aten::mul.Tensor (m): it is not unit-scaled: nothing makes up for"));
}

TEST(ScaleCauses, NeedABackward) {
  ScalesGraph graph;
  graph.nodes = {node("x", "x", {}, 9, 0)};
  EXPECT_THROW(scale_causes(graph, {}), Error);
}

TEST(ScaleCauses, FollowAProductToItsOtherOperand) {
  // The value b is small, and so are the product and the gradient of a.
  ScalesGraph graph;
  graph.nodes = {node("a", "a", {}, 1, 0.02), node("c", "c", {}, 1, 1), node("b", "aten::tanh", {1}, 0.02, 1),
                 node("p", "aten::mul.Tensor", {0, 2}, 0.02, 1)};
  const auto causes = scale_causes(graph, {said("b", "no unit-scaled equivalent")});
  ASSERT_EQ(causes.size(), 2u);
  for (const auto& cause : causes) EXPECT_THAT(cause.nodes, ElementsAre("b"));
  EXPECT_THAT(causes[0].tensors, ElementsAre("b", "p"));
  EXPECT_THAT(causes[1].tensors, ElementsAre("a"));

  // A weight's gradient is that of the output times the input, a bias's is not.
  graph.nodes = {node("c", "c", {}, 1, 1), node("b", "aten::tanh", {0}, 0.02, 1), node("w", "l.weight", {}, 1, 0.02),
                 node("v", "l.bias", {}, 1, 0.02), node("p", "plumb::linear", {1, 2, 3}, 1, 1)};
  const auto of_linear = scale_causes(graph, {said("b", "no unit-scaled equivalent")});
  ASSERT_EQ(of_linear.size(), 3u);
  for (const auto& cause : of_linear) EXPECT_EQ(cause.tensors.size(), 1u);
  for (const auto& cause : of_linear) EXPECT_THAT(cause.nodes, ElementsAre(cause.tensors[0] == "l.bias" ? "p" : "b"));
}

TEST(ScaleCauses, SaysWhereGradientsAddUpAndWhichParametersCameSmall) {
  ScalesGraph graph;
  graph.nodes = {node("x", "x", {}, 1, 9), node("w", "experts.weight", {}, 0.02, 1),
                 node("t", "aten::transpose.int", {1}, 0.02, 1), node("f", "aten::sin", {0}, 1, 1),
                 node("g", "aten::cos", {0}, 1, 1)};
  const auto causes = scale_causes(graph, {});
  ASSERT_EQ(causes.size(), 2u);
  EXPECT_EQ(causes[0].target, "a parameter");
  EXPECT_THAT(causes[0].nodes, ElementsAre("experts.weight"));
  EXPECT_THAT(causes[0].tensors, ElementsAre("t"));
  EXPECT_EQ(causes[1].reason, "the gradients of 2 uses add up");
  EXPECT_THAT(causes[1].tensors, ElementsAre("x"));
}

TEST(ScaleCauses, AreNoneWhereAllIsNearOneAndLimitsAreInOrder) {
  ScalesGraph graph;
  graph.nodes = {node("x", "x", {}, 1, 0.5), node("l", "aten::sin", {0}, 3, 1)};
  EXPECT_THAT(scale_causes(graph, {}), IsEmpty());
  EXPECT_EQ(scale_causes(graph, {}, 0.75, 2).size(), 2u);
  for (double low : {0.0, 4.0}) {
    try {
      scale_causes(graph, {}, low, 4);
      FAIL() << low;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
    }
  }
}

}  // namespace
}  // namespace plumb
