#include "plumb/transforms/verdict/verdict.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/core/error.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/module.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_models;

// Two branches, of which one's gradients pass a factor of `small` backward. Its weight's are of the other's size if its
// input makes up for that. `scale` is that of the loss.
std::shared_ptr<GraphModule> two_branches(double scale, double small = 1, bool makes_up = true) {
  torch::manual_seed(0);
  State state;
  parameter(state, "main.weight", randn_there({16, 16}));
  parameter(state, "small.weight", randn_there({16, 16}));
  parameter(state, "head.weight", randn_there({4, 16}));
  return module_of(c10::str(R"(graph { %x: f32[32, 16] = placeholder "x" %y: f32[32, 4] = placeholder "y"
      %m = get_attr "main.weight" %s = get_attr "small.weight" %h = get_attr "head.weight"
      %main: f32[32, 16] = aten::linear(%x, %m) in "":"Net" "main":"Linear"
      %large: f32[32, 16] = aten::mul.Scalar(%x, )",
                            makes_up ? 1 / small : 1, R"()
      %l: f32[32, 16] = aten::linear(%large, %s) in "":"Net" "small":"Linear"
      %small: f32[32, 16] = aten::mul.Scalar(%l, )",
                            small, R"()
      %both: f32[32, 16] = aten::add.Tensor(%main, %small)
      %o: f32[32, 4] = aten::linear(%both, %h) in "":"Net" "head":"Linear"
      %loss: f32[] = aten::mse_loss(%o, %y)
      %scaled: f32[] = aten::mul.Scalar(%loss, )",
                            scale, ") output(%scaled) }"),
                   std::move(state));
}

Verdict::Parts batch(uint64_t seed = 1) {
  torch::manual_seed(seed);
  const at::Tensor x = randn_there({32, 16}), y = randn_there({32, 4});
  return {[x, y](GraphModule& graph) { return graph(x, y); }};
}

VerdictReport of(const GraphModule& module, std::vector<std::string> recipes) {
  return verdict(module, {batch(1), batch(2)}, {.recipes = std::move(recipes)});
}

TEST(Verdict, MeasuresForwardAndBackwardApart) {
  const auto net = two_branches(1);
  const auto report = of(*net, {"fp32", "e4m3fn/none", "none/e5m2", "fp8"});
  EXPECT_EQ(report.recipes[0].error.score(), 0);
  EXPECT_EQ(report.recipes[1].error.backward, 0);
  EXPECT_GT(report.recipes[1].error.forward, 0.001);
  EXPECT_EQ(report.recipes[2].error.forward, 0);
  EXPECT_GT(report.recipes[2].error.backward, 0.001);
  EXPECT_EQ(report.recipes[3].error.forward, report.recipes[1].error.forward);
  EXPECT_EQ(report.recipes[3].error.backward, report.recipes[2].error.backward);
  EXPECT_EQ(report.batches, 2);
  EXPECT_EQ(report.full_gradients, 2) << "shared by all recipes";
  EXPECT_EQ(report.gradients, 2 + 2 * (2 + 1 + 1 + 2));
}

at::Tensor gradient_of(GraphModule& graph, const Verdict::Parts& parts) {
  std::vector<at::Tensor> parameters, flat;
  for (const Attr& attr : graph.state()) parameters.push_back(attr.tensor);
  for (const auto& g : torch::autograd::grad({parts[0](graph)}, parameters)) flat.push_back(g.flatten());
  return at::cat(flat);
}

TEST(Verdict, TheErrorIsThatOfTheWholeGradientAsSimulateFormatRoundsIt) {
  const auto net = two_branches(1);
  const auto parts = batch();
  const at::Tensor full = gradient_of(*net, parts);
  const auto rounded = derive(*net);
  simulate_format(*rounded, {.fwd = "none", .bwd = "mxfp4-RN"});
  const double error = ((gradient_of(*rounded, parts) - full).norm() / full.norm()).item<double>();
  const auto report = verdict(*net, {parts}, {.recipes = {"mxfp4"}, .explain = false});
  EXPECT_NEAR(report.recipes[0].error.backward, error, 1e-6);
  EXPECT_EQ(report.recipes[0].error.drift, 0) << "no weight whose gradient sums to zero over the rows";
}

TEST(Verdict, TheDriftIsWhatMovesAllRowsInFrontOfACrossEntropyAlike) {
  State state;
  parameter(state, "head.weight", randn_there({10, 16}));
  const auto net = module_of(R"(graph { %x: f32[32, 16] = placeholder "x" %y: i64[32] = placeholder "y"
      %h = get_attr "head.weight" %o: f32[32, 10] = aten::linear(%x, %h)
      %loss: f32[] = aten::cross_entropy_loss(%o, %y) output(%loss) })",
                             std::move(state));
  const at::Tensor x = randn_there({32, 16}), y = (3 * randn_there({32}).abs()).clamp_max(9).to(at::kLong);
  const Verdict::Parts parts{[x, y](GraphModule& graph) { return graph(x, y); }};
  const at::Tensor full = gradient_of(*net, parts);
  const auto rounded = derive(*net);
  simulate_format(*rounded, {.fwd = "none", .bwd = "mxfp4-RN"});
  const at::Tensor error = gradient_of(*rounded, parts) - full;
  const auto found = verdict(*net, {parts}, {.recipes = {"mxfp4"}}).recipes[0];
  const double drift = (error.view({10, 16}).mean(0).norm() * std::sqrt(10.0) / full.norm()).item<double>();
  EXPECT_GT(drift, 0.01);
  EXPECT_NEAR(found.error.drift, drift, 1e-6);
  EXPECT_DOUBLE_EQ(found.error.score(), found.error.backward + found.error.drift + 0.3 * found.error.forward);
  EXPECT_THAT(found.sentence(), HasSubstr(" more of drift)"));
}

TEST(Verdict, ALossScaleMendsGradientsBelowTheRangeOfAFormat) {
  const auto report = of(*two_branches(std::ldexp(1.0, -30)), {"fp8"});
  const RecipeVerdict& fp8 = report.recipes[0];
  EXPECT_EQ(fp8.error.verdict(), VerdictClass::No);
  EXPECT_TRUE(fp8.lacks_range());
  EXPECT_GE(fp8.remedy.loss_scale, std::ldexp(1.0, 12));
  EXPECT_TRUE(fp8.products.empty());
  EXPECT_EQ(fp8.remedied.verdict(), VerdictClass::Ok);
  EXPECT_THAT(fp8.sentence(), HasSubstr("What it lacks is range: with a loss scale of 2^"));
  EXPECT_EQ(report.best(), &fp8);
  EXPECT_THAT(report.recipe_file(), HasSubstr("\nloss-scale = "));
}

TEST(Verdict, ARecipeThatOnlyTheLastBatchCallsOkIsNotRecommendedForIt) {
  const auto small = [](GraphModule& graph) { return batch(1)[0](graph) * std::ldexp(1.0, -40); };
  const auto report = verdict(*two_branches(1), {Verdict::Parts{small}, batch(2)}, {.recipes = {"fp8"}});
  const RecipeVerdict& fp8 = report.recipes[0];
  EXPECT_EQ(fp8.error.verdict(), VerdictClass::No);
  EXPECT_EQ(fp8.last.verdict(), VerdictClass::Ok);
  EXPECT_FALSE(fp8.changed());
  EXPECT_EQ(fp8.remedied.verdict(), VerdictClass::No) << "no remedy, so no better than it is";
  EXPECT_THAT(report.conclusion(), HasSubstr("No recipe is ok. The nearest: fp8: no"));
  EXPECT_THAT(report.conclusion(), HasSubstr("In the last batch it is ok as it is"));
}

TEST(Verdict, NamesTheProductAndDirectionThatStandInTheWay) {
  const auto report = of(*two_branches(1, std::ldexp(1.0, -40)), {"none/e5m2", "bf16"});
  const RecipeVerdict& fp8 = report.recipes[0];
  EXPECT_EQ(fp8.error.verdict(), VerdictClass::Doubtful);
  ASSERT_EQ(fp8.products.size(), 3u);
  EXPECT_EQ(fp8.products[0].product, "small");
  EXPECT_TRUE(fp8.products[0].backward);
  EXPECT_GT(fp8.products[0].gain, 10 * std::abs(fp8.products[1].gain));
  EXPECT_EQ(fp8.remedied.verdict(), VerdictClass::Ok);
  EXPECT_THAT(fp8.remedy.products, ElementsAre(ProductFormats{"small", {}, "bf16-RN"}));
  EXPECT_THAT(fp8.sentence(), HasSubstr("the backward of small in bf16-RN"));
  EXPECT_EQ(report.recipes[1].error.verdict(), VerdictClass::Ok);
  EXPECT_THAT(report.recipes[1].sentence(), HasSubstr("bf16: ok"));
  EXPECT_THAT(report.to_text(), HasSubstr("small    backward"));
}

// AdamW would train the small branch as fast as the other one, whatever its share of the gradient's norm.
TEST(Verdict, ALayerWhoseSmallGradientsAreLostIsSeen) {
  const auto net = two_branches(1, std::ldexp(1.0, -20), false);
  const auto parts = batch();
  const auto report = verdict(*net, {parts}, {.recipes = {"fp8", "mxfp8"}});
  const RecipeVerdict& fp8 = report.recipes[0];
  EXPECT_LT(fp8.error.backward, GradientError::kMostOk);
  EXPECT_EQ(fp8.error.verdict(), VerdictClass::Doubtful) << fp8.sentence();
  EXPECT_THAT(fp8.sentence(), HasSubstr(" of the weights' own gradients)"));
  EXPECT_TRUE(fp8.lacks_range());
  EXPECT_EQ(fp8.remedied.verdict(), VerdictClass::Ok) << fp8.sentence();
  EXPECT_EQ(report.recipes[1].error.verdict(), VerdictClass::Ok) << "its scales follow the gradient down";

  const auto rounded = derive(*net);
  simulate_format(*rounded, {.fwd = "none", .bwd = "e5m2-RN"});
  const std::vector<int64_t> sizes{16 * 16, 16 * 16, 4 * 16};
  const auto full = gradient_of(*net, parts).split_with_sizes(sizes);
  const auto found = gradient_of(*rounded, parts).split_with_sizes(sizes);
  double squares = 0;
  for (size_t i = 0; i < sizes.size(); ++i)
    squares +=
        static_cast<double>(sizes[i]) * std::pow(((found[i] - full[i]).norm() / full[i].norm()).item<double>(), 2);
  EXPECT_NEAR(fp8.error.by_weight, std::sqrt(squares / (2 * 16 * 16 + 4 * 16)), 1e-6);
}

TEST(Verdict, SaysOfARemedyOnlyWhatTheRecipeDoesNotHave) {
  const auto recipe = parse_recipe("fwd = \"mxfp4\"\nbwd = \"mxfp4\"\n[[product]]\nname = \"head\"\nfwd = \"bf16\"\n");
  RecipeVerdict found{.name = "mine", .recipe = recipe, .error = {1, 0}, .remedy = recipe};
  found.remedy.products[0].bwd = "mxfp8e5m2-RN";
  EXPECT_THAT(found.sentence(), HasSubstr("With the backward of head in mxfp8e5m2-RN the score"));
}

TEST(Verdict, ABatchWithoutAGradientDoesNotCount) {
  const auto net = two_branches(1);
  Verdict measured(*net, {.recipes = {"bf16"}});
  const auto whole = batch(1);
  const Verdict::Parts zero{[&](GraphModule& graph) { return whole[0](graph) * 0; }};
  EXPECT_THAT(message_of([&] { measured.measure(zero); }), HasSubstr("gradient of the batch is zero"));
  measured.measure(whole);
  EXPECT_EQ(measured.conclude(whole).batches, 1);
}

TEST(Verdict, LeavesGradientsBuffersAndGeneratorsAsTheyWere) {
  torch::manual_seed(0);
  State state;
  parameter(state, "w", randn_there({8, 8}));
  state.add({"mean", AttrKind::Buffer, at::zeros({8})});
  state.add({"var", AttrKind::Buffer, at::ones({8})});
  const auto net = module_of(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w"
      %m = get_attr "mean" %v = get_attr "var"
      %y: f32[4, 8] = aten::linear(%x, %w)
      %n: f32[4, 8] = aten::batch_norm(%y, None, None, %m, %v, True, 0.1, 1e-5, False)
      %d: f32[4, 8] = aten::dropout(%n, 0.5, True) %s: f32[4, 8] = aten::mul.Tensor(%d, %d)
      %loss: f32[] = aten::sum(%s) output(%loss) })",
                             std::move(state));
  const at::Tensor x = randn_there({4, 8});
  const Verdict::Parts parts{[x](GraphModule& graph) { return graph(x); }};
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state().clone();
  const auto report = verdict(*net, {parts}, {.recipes = {"fp32", "mxfp4-SR"}});
  EXPECT_EQ(report.recipes[0].error.score(), 0) << "dropout draws the same mask in every graph";
  EXPECT_FALSE(net->state().get("w").tensor.grad().defined());
  EXPECT_TRUE(net->state().get("mean").tensor.equal(at::zeros({8})));
  EXPECT_TRUE(net->state().get("var").tensor.equal(at::ones({8})));
  EXPECT_TRUE(at::detail::getDefaultCPUGenerator().get_state().equal(before));
}

TEST(Verdict, PartsOfABatchAreOneGradient) {
  const auto net = two_branches(1);
  const auto whole = batch();
  const auto half = [&](GraphModule& graph) { return whole[0](graph) * 0.5; };
  const auto one = verdict(*net, {whole}, {.recipes = {"mxfp4"}, .explain = false});
  const auto two = verdict(*net, {Verdict::Parts{half, half}}, {.recipes = {"mxfp4"}, .explain = false});
  EXPECT_NEAR(one.recipes[0].error.backward, two.recipes[0].error.backward, 1e-6);
}

TEST(Verdict, MeasuresScaleFactorsAndUnitScaledModelsToo) {
  const auto report = of(*two_branches(std::ldexp(1.0, -30)), default_verdict_recipes());
  for (const RecipeVerdict& recipe : report.recipes) {
    EXPECT_EQ(recipe.problem, "") << recipe.name;
    EXPECT_GT(recipe.error.score(), 0) << recipe.name;
    const bool has_range = recipe.recipe.scales != "" || recipe.name == "bf16" || recipe.name == "mxfp8";
    if (recipe.name.ends_with("fp4")) continue;
    EXPECT_EQ(recipe.error.verdict() == VerdictClass::Ok, has_range) << recipe.sentence();
  }
}

TEST(Verdict, WhatCannotBeMeasuredIsAnErrorThatSaysSo) {
  const auto net = two_branches(1);
  EXPECT_THAT(message_of([&] { verdict(*net, {batch()}, {.recipes = {"fp9"}}); }), HasSubstr("'fp9' is no recipe"));
  const Verdict::Parts zero{[&](GraphModule& graph) { return batch()[0](graph) * 0; }};
  EXPECT_THAT(message_of([&] { verdict(*net, {zero}, {.recipes = {"bf16"}}); }),
              HasSubstr("gradient of the batch is zero"));
  const Verdict::Parts none{[&](GraphModule& graph) { return at::ones({}); }};
  EXPECT_THAT(message_of([&] { verdict(*net, {none}, {.recipes = {"bf16"}}); }),
              HasSubstr("no number with a gradient"));
  EXPECT_THAT(message_of([&] { verdict(*net, {}); }), HasSubstr("no batch was measured"));
  EXPECT_THAT(message_of([&] { verdict(*net, {{Verdict::Part()}}); }),
              HasSubstr("a part of the batch has no function"));
}

TEST(Verdict, MeasuresHalfOfItsStepsBehindTheWarmUp) {
  EXPECT_THAT(verdict_steps(4, 0), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(verdict_steps(4, 20), ElementsAre(1, 2, 21, 22));
  EXPECT_THAT(verdict_steps(3, 1), ElementsAre(1, 2, 3));
  EXPECT_THAT(verdict_steps(1, 9), ElementsAre(1));
}

}  // namespace
}  // namespace plumb
