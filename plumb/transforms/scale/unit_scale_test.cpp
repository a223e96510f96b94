#include "plumb/transforms/scale/unit_scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/scaling/optim.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/scale/residual.h"
#include "plumb/transforms/scale/unit_scale_testing.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_unit_scale;

TEST(UnitScale, ReplacesOperatorsByTheirEquivalents) {
  EXPECT_EQ(after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %t: i64[4] = placeholder "t"
      %w = get_attr "w"
      %b = get_attr "b"
      %l = aten::linear(%x, %w, %b)
      %g = aten::gelu(%l, approximate="tanh")
      %s = aten::silu(%g)
      %d = aten::dropout(%s, 0.1, True)
      %n = aten::layer_norm(%d, [8])
      %r = aten::rms_norm(%n, [8])
      %m = aten::matmul(%r, %g)
      %p = aten::softmax.int(%m, -1)
      %q = aten::add.Tensor(%p, %m)
      %c = aten::cross_entropy_loss(%q, %t, None, 1, -100, 0.1)
      output(%c)
    })",
                          with({{"w", {8, 8}}, {"b", {8}}})),
            same(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %t: i64[4] = placeholder "t"
      %w = get_attr "w"
      %b = get_attr "b"
      %l = plumb::linear(%x, %w, %b)
      %g = plumb::gelu(%l, approximate="tanh")
      %s = plumb::silu(%g)
      %d = plumb::dropout(%s, 0.1)
      %n = plumb::layer_norm(%d, [8])
      %r = plumb::rms_norm(%n, [8])
      %m = plumb::matmul(%r, %g)
      %m_branch, %m_skip = plumb::residual_split(%m, 0.01)
      %p = plumb::softmax(%m_branch, -1)
      %q = plumb::residual_add(%p, %m_skip, 0.01)
      %c = plumb::cross_entropy(%q, %t, None, 1, -100, 0.1)
      output(%c)
    })"))
      << "softmax lies on the branch, so its constraint stays";
}

TEST(UnitScale, ReplacesDropoutThatIsWrittenInPlace) {  // as classifiers of image models write it
  const std::string text = after_scaling(R"(graph { %x: f32[4, 8] = placeholder "x" %h: f32[4, 8] = aten::neg(%x)
      %d: f32[4, 8] = aten::dropout_(%h, 0.2, True) %y: f32[4, 8] = aten::mul.Tensor(%h, %d) output(%y) })");
  EXPECT_THAT(text, testing::AllOf(HasSubstr("plumb::dropout(%h, 0.2)"), HasSubstr("mul.Tensor(%d, %d)")));
}

TEST(UnitScale, LeavesGatesAloneThatLetAShareThrough) {
  for (const char* gated : {"aten::mul.Tensor(%h, %z)", "aten::mul.Tensor(%z, %h)", "aten::lerp.Tensor(%x, %h, %z)",
                            "aten::addcmul(%x, %z, %h)"}) {
    const std::string text = after_scaling(std::string(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %h = aten::tanh(%x)
      %z = aten::sigmoid(%x)
      %y = )") + gated + R"(
      %u = aten::tanh(%x) %v = aten::mul.Tensor(%u, %h)
      %s = aten::sigmoid(%x) %t = aten::mul.Tensor(%s, 3) %w = aten::add.Tensor(%t, %h)
      output(%y, %v, %w)
    })");
    EXPECT_THAT(text, HasSubstr("%z = aten::sigmoid(%x)")) << gated;
    for (const char* scaled : {"%u = plumb::tanh(%x", "%s = plumb::sigmoid(%x"}) EXPECT_THAT(text, HasSubstr(scaled));
  }
}

TEST(UnitScale, LeavesProbabilitiesAloneThatAreReadByTheirRange) {
  const std::string graph = R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %i: i64[4, 1] = placeholder "i"
      %p = aten::sigmoid(%x)
      %v = aten::view(%p, [8, 4])
      %b = aten::bernoulli(%v)
      %g = aten::sigmoid(%x)
      %o = aten::rsub.Scalar(%g, 1)
      %s = aten::sigmoid(%x)
      %t = aten::tanh(%s)
      %m = aten::mul.Scalar(%t, 0.9)
      %a = aten::atanh(%m)
      %q = aten::softmax.int(%x, 1)
      %k = aten::gather(%q, 1, %i)
      %r = aten::rsub.Scalar(%k, 1) %w = aten::sigmoid(%x) %n = aten::view(%w, [8, 4])
      %c = aten::softmax.int(%x, 1) %d = aten::sum.dim_IntList(%c, [1]) %e = aten::sub.Tensor(%d, 1)
      %f = aten::sigmoid(%x) %h = aten::gt.Scalar(%f, 0.5) %j = aten::tanh(%x) %l = aten::gt.Scalar(%j, 0)
      %u = aten::sub.Tensor(%j, %x)
      %y = aten::sigmoid(%x) %z = aten::mse_loss(%y, %x) %aa = aten::gelu(%x) %ab = aten::sigmoid(%x)
      %ac = aten::mse_loss(%aa, %ab)
      output(%b, %o, %a, %r, %n, %e, %h, %l, %u, %z, %ac)
    })";
  Report report("unit_scale");
  const std::string scaled = after_scaling(graph, {}, {}, &report);
  EXPECT_THAT(scaled, HasSubstr("%ab = plumb::sigmoid(%x"));
  for (std::string kept : {"%p", "%g", "%w", "%f", "%y"}) EXPECT_THAT(scaled, HasSubstr(kept + " = aten::sigmoid(%x)"));
  EXPECT_THAT(scaled, HasSubstr("%s = plumb::sigmoid(%x"));
  EXPECT_THAT(scaled, HasSubstr("%t = aten::tanh(%s)"));
  for (std::string kept : {"%q", "%c"}) EXPECT_THAT(scaled, HasSubstr(kept + " = aten::softmax.int(%x, 1)"));
  EXPECT_THAT(scaled, HasSubstr("%j = plumb::tanh(%x"));
  for (const char* why : {"aten::bernoulli reads it by its range", "the model returns it"})
    EXPECT_THAT(report.to_text(), HasSubstr(why));
}

TEST(UnitScale, SplitsASkipAndWeighsTheBranch) {
  EXPECT_EQ(after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f = aten::gelu(%x)
      %y = aten::add.Tensor(%f, %x)
      %z = aten::gelu(%y)
      output(%z)
    })"),
            same(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %x_branch: f32[4, 8], %x_skip: f32[4, 8] = plumb::residual_split(%x, 0.5)
      %f = plumb::gelu(%x_branch)
      %y = plumb::residual_add(%f, %x_skip, 0.5)
      %z = plumb::gelu(%y, constraint=None)
      output(%z)
    })"));
}

TEST(UnitScale, LeavesUsesBesideTheBranchOnTheSkipItself) {
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f = aten::gelu(%x)
      %h = aten::silu(%x)
      %y = aten::add.Tensor(%x, %f)
      output(%y, %h, %x)
    })");
  EXPECT_THAT(text, HasSubstr("plumb::gelu(%x_branch)"));
  EXPECT_THAT(text, HasSubstr("plumb::silu(%x, constraint=None)"));
  EXPECT_THAT(text, HasSubstr("output(%y, %h, %x)"));
}

TEST(UnitScale, NestsSplitsOfOneSkip) {
  // z = x + g(x + f(x)): the outer split comes first, and the inner one takes its branch.
  EXPECT_EQ(after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f = aten::gelu(%x)
      %y = aten::add.Tensor(%x, %f)
      %g = aten::silu(%y)
      %z = aten::add.Tensor(%x, %g)
      output(%z)
    })"),
            same(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %x_branch: f32[4, 8], %x_skip: f32[4, 8] = plumb::residual_split(%x, 0.5)
      %x_branch_1: f32[4, 8], %x_skip_1: f32[4, 8] = plumb::residual_split(%x_branch, 0.5)
      %f = plumb::gelu(%x_branch_1)
      %y = plumb::residual_add(%f, %x_skip_1, 0.5)
      %g = plumb::silu(%y)
      %z = plumb::residual_add(%g, %x_skip, 0.5)
      output(%z)
    })"));
}

TEST(UnitScale, TakesASumAsASkip) {
  const std::string text = after_scaling(R"(graph {
      %tok: f32[4, 8] = placeholder "tok"
      %pos: f32[4, 8] = placeholder "pos"
      %x = aten::add.Tensor(%tok, %pos)
      %f = aten::gelu(%x)
      %y = aten::add.Tensor(%x, %f)
      output(%y)
    })");
  EXPECT_THAT(text, HasSubstr("%x = plumb::add(%tok, %pos, constraint=None)"));
  EXPECT_THAT(text, HasSubstr("%x_branch, %x_skip = plumb::residual_split(%x, 0.5)"));
  EXPECT_THAT(text, HasSubstr("%y = plumb::residual_add(%f, %x_skip, 0.5)"));
}

TEST(UnitScale, KeepsTheConstraintOfASumInsideABranch) {
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %a = aten::gelu(%x)
      %b = aten::silu(%x)
      %s = aten::add.Tensor(%a, %b)
      %y = aten::add.Tensor(%x, %s)
      output(%y)
    })");
  EXPECT_THAT(text, HasSubstr("%s = plumb::add(%a, %b)\n"));
}

TEST(UnitScale, LeavesAddsOfNumbersIntegersAndMasksAlone) {
  State state;
  state.add({"mask", AttrKind::Buffer, at::full({4, 4}, -INFINITY).triu(1)});
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 4] = placeholder "x"
      %i: i64[4] = placeholder "i"
      %mask = get_attr "mask"
      %a = aten::add.Tensor(%x, 1.0)
      %j: i64[4] = aten::add.Tensor(%i, %i)
      %m = aten::add.Tensor(%a, %mask)
      %e = aten::eq.Scalar(%i, 0)
      %f = aten::full([4, 4], 0.0)
      %g = aten::masked_fill.Scalar(%f, %e, -1e9)
      %n = aten::add.Tensor(%m, %g)
      output(%n, %j)
    })",
                                         std::move(state), {}, &report);
  EXPECT_THAT(text, HasSubstr("%a = aten::add.Tensor(%x, 1.0)"));
  EXPECT_THAT(text, HasSubstr("%j: i64[4] = aten::add.Tensor(%i, %i)"));
  EXPECT_THAT(text, HasSubstr("%m = aten::add.Tensor(%a, %mask)"));
  EXPECT_THAT(text, HasSubstr("%n = aten::add.Tensor(%m, %g)"));
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "a")->reason, "it adds a number");
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "m")->reason, "it adds a mask");
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "n")->reason, "it adds a mask");
}

TEST(UnitScale, SaysWhatItLeavesAlone) {
  Report report;
  after_scaling(
      R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %p: f32[3] = get_attr "positions"
      %angles = aten::matmul(%p, %p)
      %r = aten::hardtanh(%x)
      %v = aten::view(%r, [8, 4])
      output(%v, %angles)
    })",
      [] {
        State state;
        state.add({"positions", AttrKind::Buffer, ones_there({3})});
        return state;
      }(),
      {}, &report);
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "angles")->reason, "no gradient flows through it");
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "r")->reason, "no unit-scaled equivalent");
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "v"), nullptr) << "a view changes no scale";
}

TEST(UnitScale, SaysThatItLeavesProductsAndDropoutAloneThatMayReturnAnInput) {
  for (const char* call : {"aten::einsum(\"ij,kj->ik\", [%x, %x])", "aten::chain_matmul([%x, %x, %x])",
                           "aten::feature_dropout(%x, 0.5, True)", "aten::alpha_dropout(%x, 0.5, True)"}) {
    Report report;
    after_scaling(std::string(R"(graph { %x: f32[4, 4] = placeholder "x" %y = )") + call + " output(%y) }", {}, {},
                  &report);
    ASSERT_TRUE(report.find(ReportKind::LeftAlone, "y")) << call;
    EXPECT_EQ(report.find(ReportKind::LeftAlone, "y")->reason, "no unit-scaled equivalent");
  }
}

TEST(UnitScale, AnswersUnchangedForAGraphWithNothingToScale) {
  auto module = module_of(R"(graph { %x: f32[2] = placeholder "x" %y = aten::neg(%x) output(%y) })");
  const std::string before = to_string(module->graph());
  EXPECT_FALSE(unit_scale(*module, {}));
  EXPECT_EQ(to_string(module->graph()), before);
}

TEST(UnitScale, PutsAddmmBackToALinear) {
  const std::string text =
      after_scaling(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b" %t = aten::t(%w)
      %y = aten::addmm(%b, %x, %t) output(%y) })",
                    with({{"w", {3, 8}}, {"b", {3}}}));
  EXPECT_THAT(text, HasSubstr("%y = plumb::linear(%x, %w, %b, constraint=None)"));
}

// --- parameters

TEST(UnitScale, TrainsWithTheScaledOptimizersAsItIs) {
  at::manual_seed(0);
  auto scaled = unit_scale(gpt());
  optim::AdamW optimizer(scaled->parameters(), torch::optim::AdamWOptions(0.1));
  const auto inputs = gpt_inputs();
  double first = 0, last = 0;
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = scaled->run(inputs)[0].toTensor();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.8 * first);
}

TEST(UnitScale, FindsBothResidualLayersOfEveryBlock) {
  auto scaled = unit_scale(gpt());
  const Report& report = scaled->reports.back();
  const auto residual = report.of_kind(ReportKind::Residual);
  ASSERT_EQ(residual.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(*residual[i]->tau, i % 2 == 0 ? 0.01 : 0.5);
  EXPECT_EQ(report.find(ReportKind::Replaced, "x0")->to, "plumb::add");
  EXPECT_EQ(report.find(ReportKind::Replaced, "qkv0")->module, "blocks.0.qkv");
  EXPECT_NE(report.find(ReportKind::Unconstrained, "logits"), nullptr);
  EXPECT_EQ(report.find(ReportKind::Unconstrained, "up1"), nullptr);
  EXPECT_THAT(report.to_json(), HasSubstr("\"tau\": 0.01"));
  EXPECT_THAT(report.to_text(),
              HasSubstr("residual mid0 aten::add.Tensor -> plumb::residual_add tau=0.01: attention on the branch"));
}

TEST(UnitScale, BringsEveryActivationAndGradientOfATransformerNearScaleOne) {
  at::manual_seed(0);
  GptConfig config;
  config.width = 128, config.layers = 3, config.vocabulary = 128;
  auto tracked = track_scales(unit_scale(gpt(config)));
  tracked->run(gpt_inputs(config))[0].toTensor().backward();
  const ScalesGraph graph = scales_graph(*tracked);
  size_t seen = 0;
  for (const ScaleNode& node : graph.nodes) {
    if (node.kind != NodeKind::CallFunction || !node.metrics || node.target == "plumb::cross_entropy") continue;
    EXPECT_GT(node.metrics->fwd.std, 0.25) << node.name << "\n" << graph.to_text();
    EXPECT_LT(node.metrics->fwd.std, 3.0) << node.name;
    ASSERT_TRUE(node.metrics->bwd) << node.name;
    EXPECT_GT(node.metrics->bwd->std, 0.1) << node.name << "\n" << graph.to_text();
    EXPECT_LT(node.metrics->bwd->std, 8.0) << node.name;
    ++seen;
  }
  EXPECT_GT(seen, 40u);
  for (const auto& p : tracked->named_parameters()) {
    ASSERT_TRUE(p.value().grad().defined()) << p.key();
    if (p.value().dim() < 2) continue;
    const double std = p.value().grad().std().item<double>();
    EXPECT_GT(std, 0.05) << p.key();
    EXPECT_LT(std, 20.0) << p.key();
  }
}

TEST(UnitScale, KeepsEveryGradientsDirection) {
  // Whatever the scales, each parameter's gradient must point where the function's own derivative does. Derivatives by
  // central differences, in double.
  at::manual_seed(5);
  State state;
  for (const char* name : {"a", "b", "c", "d", "e"}) parameter(state, name, randn_there({3, 3}, at::kDouble));
  auto module = module_of(R"(graph {
      %x: f64[5, 3] = placeholder "x"
      %target: f64[5, 3] = placeholder "target"
      %a = get_attr "a"
      %b = get_attr "b"
      %c = get_attr "c"
      %d = get_attr "d"
      %e = get_attr "e"
      %x0 = aten::linear(%x, %a)
      %f = aten::linear(%x0, %b)
      %f1 = aten::gelu(%f)
      %g = aten::linear(%x0, %c)
      %s = aten::add.Tensor(%f1, %g)
      %y = aten::add.Tensor(%x0, %s)
      %h = aten::linear(%y, %d)
      %h1 = aten::silu(%h)
      %z = aten::add.Tensor(%x0, %h1)
      %o = aten::linear(%z, %e)
      %loss = aten::mse_loss(%o, %target)
      output(%loss)
    })",
                          std::move(state));
  auto scaled = unit_scale(module);
  ASSERT_EQ(scaled->reports.back().count(ReportKind::Residual), 2u);
  const at::Tensor x = randn_there({5, 3}, at::kDouble), target = randn_there({5, 3}, at::kDouble);
  scaled->run({x, target})[0].toTensor().backward();
  at::NoGradGuard no_grad;
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    at::Tensor p = scaled->state().get(name).tensor, by_differences = at::zeros_like(p);
    for (int64_t i = 0; i < 9; ++i) {
      auto loss_at = [&](double step) {
        p.view(-1)[i].add_(step);
        const double loss = scaled->run({x, target})[0].toTensor().item<double>();
        p.view(-1)[i].sub_(step);
        return loss;
      };
      by_differences.view(-1)[i].fill_((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5);
    }
    const double cosine =
        (p.grad() * by_differences).sum().item<double>() / (p.grad().norm() * by_differences.norm()).item<double>();
    EXPECT_GT(cosine, 1 - 1e-6) << name;
  }
}

TEST(UnitScale, ChoosesTausByDepth) {
  UnitScaleOptions options;
  options.tau_rule = TauRule::Depth;
  auto scaled = unit_scale(gpt(), options);
  const auto residual = scaled->reports.back().of_kind(ReportKind::Residual);
  ASSERT_EQ(residual.size(), 4u);
  // Four branches, each with variance 1/2 next to what came before: tau^2 = (1/2) / (1 + i/2).
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(*residual[i]->tau, std::sqrt(0.5 / (1 + 0.5 * double(i))), 1e-12);
  EXPECT_EQ(scaled->mup.at("blocks.0.up.weight").scaling_depth, 4);
  EXPECT_EQ(scaled->mup.at("tok.weight").scaling_depth, std::nullopt);
  const auto taus = depth_taus({true, false}, 2.0, 3.0);
  EXPECT_NEAR(taus[0] / taus[1] * std::sqrt(1 / (1 + taus[0] * taus[0])), 3.0, 1e-12) << "the ratio of what both add";
}

TEST(UnitScale, ScalesAConvolutionalNet) {
  at::manual_seed(0);
  State state;
  parameter(state, "k", randn_there({8, 3, 3, 3}) * 0.05);
  parameter(state, "g", ones_there({8}));
  parameter(state, "h", zeros_there({8}));
  parameter(state, "u", randn_there({8, 4, 2, 2}) * 0.05);
  state.add({"mean", AttrKind::Buffer, zeros_there({8})});
  state.add({"var", AttrKind::Buffer, ones_there({8})});
  auto scaled = unit_scale(module_of(R"(graph {
      %x: f32[4, 3, 8, 8] = placeholder "x"
      %k = get_attr "k"
      %g = get_attr "g"
      %h = get_attr "h"
      %u = get_attr "u"
      %mean = get_attr "mean"
      %var = get_attr "var"
      %c = aten::conv2d.padding(%x, %k, None, 1, "same")
      %n = aten::batch_norm(%c, %g, %h, %mean, %var, True, 0.1, 1e-05, True)
      %r = aten::relu(%n)
      %p = aten::max_pool2d(%r, [2, 2])
      %a = aten::avg_pool2d(%p, [2, 2])
      %d = aten::avg_pool2d(%p, [2, 2], [2, 2], 0, False, True, 3)
      %t = aten::conv_transpose2d.input(%a, %u, None, 2)
      output(%t, %d)
    })",
                                     std::move(state)));
  const std::string text = to_string(scaled->graph());
  for (const char* call : {"plumb::conv2d.padding(", "plumb::batch_norm(", "plumb::relu(", "plumb::max_pool2d(",
                           "plumb::avg_pool2d(%p, [2, 2]", "aten::avg_pool2d(%p", "plumb::conv_transpose2d("}) {
    EXPECT_THAT(text, HasSubstr(call));
  }
  EXPECT_NEAR(scaled->state().get("u").tensor.std().item<double>(), 1.0, 1e-5);
  EXPECT_EQ(scaled->run({randn_there({4, 3, 8, 8})})[0].toTensor().size(1), 4);
}

TEST(UnitScale, GivesTheSameAfterSimulateFormatAsBefore) {
  at::manual_seed(0);
  auto module = gpt();
  SimulateFormatOptions nearest;
  nearest.fwd = "e4m3fn-RN", nearest.bwd = "e5m2-RN";
  auto one = simulate_format(unit_scale(module), nearest);
  auto other = unit_scale(simulate_format(module, nearest));
  const auto inputs = gpt_inputs();
  const at::Tensor a = one->run(inputs)[0].toTensor(), b = other->run(inputs)[0].toTensor();
  EXPECT_TRUE(at::equal(a, b)) << a << b;
  a.backward();
  b.backward();
  for (const auto& p : one->named_parameters()) {
    EXPECT_TRUE(at::equal(p.value().grad(), other->named_parameters()[p.key()].grad())) << p.key();
  }
}

TEST(UnitScale, ScalesAHundredThousandNodes) {
  Graph graph;
  Value* x = graph.placeholder("x", TensorMeta{at::kFloat, {4}, {1}})->result();
  while (graph.size() < 100'000) {
    Value* f = graph.call("aten::gelu", {graph.call("aten::silu", {x})->result()})->result();
    x = graph.call("aten::add.Tensor", {x, f})->result();
  }
  graph.output({x});
  GraphModule module(std::move(graph), {}, TreeSpec::positional_inputs(1), TreeSpec::leaf());
  Report report;
  EXPECT_TRUE(unit_scale(module, {}, &report));
  EXPECT_EQ(report.count(ReportKind::Residual), 33'333u);
}

TEST(UnitScale, FollowsAProbabilityThroughAHundredThousandNodes) {
  Graph graph;
  Value* x = graph.placeholder("x", TensorMeta{at::kFloat, {4}, {1}})->result();
  x = graph.call("aten::sigmoid", {x})->result();
  while (graph.size() < 100'000) x = graph.call("aten::mul.Tensor", {x, 0.5})->result();
  graph.output({graph.call("aten::clamp", {x, 0.0, 1.0})->result()});
  GraphModule module(std::move(graph), {}, TreeSpec::positional_inputs(1), TreeSpec::leaf());
  Report report;
  unit_scale(module, {}, &report);
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "sigmoid")->reason, HasSubstr("aten::clamp reads it by its range"));
}

TEST(UnitScale, RefusesAReplacementThatIsInAnotherGraph) {
  Graph other;
  UnitScaleOptions options;
  options.replace = {{"aten::gelu", "", [&](Graph&, const Node&) { return other.placeholder("x"); }}};
  try {
    unit_scale(gpt(), options);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::InvalidArgument);
    EXPECT_THAT(e.what(), HasSubstr("the replacement of aten::gelu has returned a node of another graph"));
  }
}

TEST(UnitScale, RunsFromTheTableOfPasses) {
  auto module = gpt();
  std::vector<std::string> lines;
  EXPECT_TRUE(run_pass(find_pass("unit_scale"), *module, {{"tau_mlp", "0.25"}, {"replace", "aten::gelu=plumb::silu"}},
                       &lines, true));
  EXPECT_THAT(lines, testing::Contains(HasSubstr("tau=0.25")));
  EXPECT_THAT(lines, testing::Contains(HasSubstr("act0 aten::gelu -> plumb::silu: as asked for")));
  const PassStep step =
      parse_pass_step("unit_scale,replace=aten::gelu=plumb::silu,aten::relu=plumb::gelu,tau_mlp=0.25");
  EXPECT_EQ(step.options.at("replace"), "aten::gelu=plumb::silu,aten::relu=plumb::gelu");
  EXPECT_EQ(step.options.at("tau_mlp"), "0.25");
  EXPECT_THROW(run_pass(find_pass("unit_scale"), *module, {{"tau_mlp", "big"}}), Error);
  EXPECT_THROW(run_pass(find_pass("unit_scale"), *module, {{"no_such", "1"}}), Error);
}

TEST(UnitScale, LeavesLayersAloneWhoseWeightIsComputedFromParameters) {
  State state;
  parameter(state, "g", rand_there({4, 1}));
  parameter(state, "v", randn_there({4, 8}) * 3);
  parameter(state, "b", ones_there({4}));
  parameter(state, "w", randn_there({8, 4}) * 3);
  auto scaled = unit_scale(module_of(R"(graph {
    %x: f32[6, 8] = placeholder "x"
    %g: f32[4, 1] grad = get_attr "g"
    %v: f32[4, 8] grad = get_attr "v"
    %b: f32[4] grad = get_attr "b"
    %w: f32[8, 4] grad = get_attr "w"
    %n: f32[4, 8] grad = aten::_weight_norm(%v, %g)
    %y: f32[6, 4] grad = aten::linear(%x, %n, %b)
    %t: f32[4, 8] grad = aten::t(%w)
    %z: f32[6, 4] grad = aten::linear(%x, %t)
    output(%y, %z)
  })",
                                     state));
  const Report& report = scaled->reports.back();
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "y")->reason,
            "its weight is computed from v, whose scale is not its own");
  EXPECT_TRUE(report.find(ReportKind::Replaced, "z"));
  EXPECT_TRUE(at::equal(scaled->state().get("v").tensor, state.get("v").tensor));
  EXPECT_TRUE(at::equal(scaled->state().get("b").tensor, state.get("b").tensor));
  const at::Tensor x = randn_there({6, 8});
  EXPECT_TRUE(
      at::equal(scaled->run({x})[0].toTensor(),
                at::linear(x, at::_weight_norm(state.get("v").tensor, state.get("g").tensor), state.get("b").tensor)));
}

}  // namespace
}  // namespace plumb
