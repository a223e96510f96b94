#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/scale/unit_scale_testing.h"

// The user's own replacements, and the treatment of weights and biases.
namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_unit_scale;

TEST(UnitScale, ReplacesWhatTheUserNamesFirst) {
  UnitScaleOptions options;
  options.replace.push_back({"aten::relu", "plumb::gelu", nullptr});
  options.replace.push_back({"aten::gelu", "aten::tanh", nullptr});
  options.replace.push_back(
      {"aten::sigmoid", "", [](Graph& g, const Node& node) { return g.call("plumb::silu", {node.input(0)}); }});
  Report report;
  const std::string text = after_scaling(
      R"(graph { %x: f32[2] = placeholder "x" %a = aten::relu(%x) %b = aten::sigmoid(%a) %c = aten::silu(%b)
      %y = aten::add.Tensor(%c, %x) output(%y) })",
      {}, options, &report);
  EXPECT_THAT(text, HasSubstr("%a = plumb::gelu("));
  EXPECT_THAT(text, HasSubstr("%b = plumb::silu("));
  EXPECT_THAT(text, HasSubstr("%c = plumb::silu("));
  EXPECT_EQ(report.find(ReportKind::Replaced, "a")->reason, "as asked for");
  EXPECT_TRUE(report.find(ReportKind::Replaced, "a")->asked);
}

TEST(UnitScale, TheUsersMapComesBeforeOperatorsArePutTogether) {
  UnitScaleOptions options;
  options.replace = {{"aten::sigmoid", "plumb::tanh", nullptr}, {"aten::addmm", "", [](Graph& g, const Node& node) {
                                                                   return g.call("aten::relu", {node.input(1)});
                                                                 }}};
  Report report;
  const std::string text = after_scaling(
      R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b" %t = aten::t(%w)
      %y = aten::addmm(%b, %x, %t) %s = aten::sigmoid(%y) %z = aten::mul.Tensor(%y, %s) output(%z) })",
      with({{"w", {3, 8}}, {"b", {3}}}), options, &report);
  EXPECT_THAT(text, HasSubstr("%s = plumb::tanh(%y"));
  EXPECT_THAT(text, HasSubstr("%y = aten::relu(%x)"));
  EXPECT_EQ(report.find(ReportKind::Replaced, "y")->to, "aten::relu");
}

TEST(UnitScale, TheUsersMapAlsoSeesWhatOperatorsArePutTogetherTo) {
  UnitScaleOptions options;
  options.replace = {{"aten::silu", "plumb::gelu", nullptr}};
  EXPECT_THAT(after_scaling(R"(graph { %x: f32[4] = placeholder "x" %s = aten::sigmoid(%x)
      %z = aten::mul.Tensor(%x, %s) output(%z) })",
                            {}, options),
              HasSubstr("%silu = plumb::gelu(%x"));
}

TEST(UnitScale, SaysWhichReplacementsFoundNothing) {
  UnitScaleOptions options;
  options.replace = {{"aten::relu", "plumb::gelu", nullptr}, {"aten::gelu", "plumb::silu", nullptr}};
  Report report;
  after_scaling(R"(graph { %x: f32[2] = placeholder "x" %a = aten::relu(%x) output(%a) })", {}, options, &report);
  ASSERT_TRUE(report.find(ReportKind::LeftAlone, "aten::gelu"));
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "aten::gelu")->reason, HasSubstr("no such operator is in the graph"));
  EXPECT_FALSE(report.find(ReportKind::LeftAlone, "aten::relu"));
}

TEST(UnitScale, DoesNotReplaceAReplacement) {
  UnitScaleOptions options;
  options.replace.push_back({"aten::relu", "aten::gelu", nullptr});
  EXPECT_THAT(after_scaling(R"(graph { %x: f32[2] = placeholder "x" %a = aten::relu(%x) output(%a) })", {}, options),
              HasSubstr("aten::gelu(%x)"));
}

TEST(UnitScale, RefusesAReplacementThatDoesNotExistOrFit) {
  UnitScaleOptions options;
  options.replace.push_back({"aten::relu", "plumb::no_such_operator", nullptr});
  const char* text = R"(graph { %x: f32[2] = placeholder "x" %a = aten::leaky_relu(%x, 0.3) output(%a) })";
  EXPECT_THROW(after_scaling(text, {}, options), Error);
  options.replace[0] = {"aten::leaky_relu", "aten::relu", nullptr};
  try {
    after_scaling(text, {}, options);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(),
                HasSubstr("%a (aten::leaky_relu) cannot become aten::relu, which has no argument 'negative_slope'"));
  }
  UnitScaleOptions bad;
  bad.tau_mlp = 0;
  EXPECT_THROW(after_scaling(text, {}, bad), Error);
}

TEST(UnitScale, GivesWeightsUnitVarianceAndZeroesBiasesInACopy) {
  State state = with({{"w", {16, 8}}, {"b", {16}}, {"g", {16}}, {"gb", {16}}, {"other", {3, 3}}});
  auto module =
      module_of(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b" %g = get_attr "g"
      %gb = get_attr "gb" %o = get_attr "other" %y = aten::linear(%x, %w, %b) %n = aten::layer_norm(%y, [16], %g, %gb)
      %s = aten::sum(%o) %m = aten::mul.Tensor(%n, %s) output(%m) })",
                std::move(state));
  const State before = module->state().deep_copy();
  auto scaled = unit_scale(module);
  const State& now = scaled->state();
  for (const Attr& attr : before)
    EXPECT_TRUE(at::equal(attr.tensor, module->state().get(attr.name).tensor)) << attr.name;
  EXPECT_NEAR(now.get("w").tensor.std().item<double>(), 1.0, 1e-5);
  EXPECT_TRUE(at::allclose(now.get("w").tensor, before.get("w").tensor / before.get("w").tensor.std()));
  EXPECT_TRUE(at::equal(now.get("b").tensor, zeros_there({16})));
  for (const char* name : {"g", "gb", "other"}) {
    EXPECT_TRUE(at::equal(now.get(name).tensor, before.get(name).tensor)) << name;
    EXPECT_FALSE(now.get(name).tensor.is_same(module->state().get(name).tensor)) << name;
  }
  for (const Attr& attr : now) EXPECT_TRUE(attr.tensor.requires_grad() && attr.tensor.is_leaf()) << attr.name;
  EXPECT_EQ(scaled->mup.at("w").type, MupType::Weight);
  EXPECT_EQ(scaled->mup.at("b").type, MupType::Bias);
  EXPECT_EQ(scaled->mup.at("g").type, MupType::Norm);
  EXPECT_EQ(scaled->mup.at("gb").type, MupType::Bias);
  EXPECT_EQ(parameter_data(now.get("w").tensor), scaled->mup.at("w")) << "the tensors are tagged";
  EXPECT_EQ(parameter_data(scaled->deep_copy()->state().get("w").tensor), scaled->mup.at("w"));
  EXPECT_EQ(parameter_data(module->state().get("w").tensor), std::nullopt);
  const Report& report = scaled->reports.back();
  EXPECT_NE(report.find(ReportKind::Weight, "w"), nullptr);
  EXPECT_NE(report.find(ReportKind::Bias, "b"), nullptr);
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "other")->reason, HasSubstr("aten::sum"));
  bool found = false;
  for (const auto& p : scaled->named_parameters())
    found = found || (p.key() == "w" && p.value().is_same(now.get("w").tensor));
  EXPECT_TRUE(found) << "named_parameters() shows the scaled tensor";
}

TEST(UnitScale, ScalesATiedWeightOnce) {
  at::manual_seed(0);
  auto module = gpt();
  auto scaled = unit_scale(module);
  EXPECT_NEAR(scaled->state().get("tok.weight").tensor.std().item<double>(), 1.0, 1e-5);
  EXPECT_TRUE(scaled->state().get("head.weight").tensor.is_same(scaled->state().get("tok.weight").tensor));
  EXPECT_EQ(scaled->reports.back().find(ReportKind::Weight, "tok.weight")->reason, "also named head.weight");
}

TEST(UnitScale, RescalesAWeightWithItsOperatorsOrNotAtAll) {
  Report report;
  State state = with({{"w", {8, 8}}, {"b", {8}}});
  auto module = module_of(
      R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b" %y = aten::linear(%x, %w, %b)
      %z = aten::gelu(%y) %h = aten::hardtanh(%w) %q = aten::mul.Tensor(%z, %h) output(%q) })",
      std::move(state));
  auto scaled = unit_scale(module);
  EXPECT_THAT(to_string(scaled->graph()), HasSubstr("%y = aten::linear(%x, %w, %b)"));
  EXPECT_TRUE(at::equal(scaled->state().get("w").tensor, module->state().get("w").tensor));
  EXPECT_TRUE(at::equal(scaled->state().get("b").tensor, module->state().get("b").tensor));
  EXPECT_THAT(scaled->reports.back().find(ReportKind::LeftAlone, "y")->reason,
              HasSubstr("its weight w is used by node %h (aten::hardtanh), too"));
}

TEST(UnitScale, SeesPackedAndCastWeights) {
  auto module =
      module_of(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "in_proj" %b = get_attr "in_proj_bias"
      [%q, %k, %v] = aten::chunk(%w, 3) [%qb, %kb, %vb] = aten::chunk(%b, 3) %c = aten::to.dtype(%q, torch.float32)
      %a = aten::linear(%x, %c, %qb) %d = aten::linear(%x, %k, %kb) %e = aten::linear(%a, %v, %vb) output(%d, %e) })",
                with({{"in_proj", {24, 8}}, {"in_proj_bias", {24}}}));
  auto scaled = unit_scale(module);
  EXPECT_NEAR(scaled->state().get("in_proj").tensor.std().item<double>(), 1.0, 1e-5);
  EXPECT_EQ(scaled->state().get("in_proj_bias").tensor.abs().max().item<double>(), 0.0);
  EXPECT_EQ(scaled->reports.back().count(ReportKind::Weight), 1u);
}

TEST(UnitScale, LeavesAConstantWeightAlone) {
  // The deviation of ten times 0.1 that torch computes is not quite zero.
  for (const at::Tensor& constant : {ones_there({4, 4}), at::full({10, 4}, 0.1)}) {
    State state;
    parameter(state, "w", constant.clone());
    auto scaled = unit_scale(
        module_of(R"(graph { %x: f32[4, 4] = placeholder "x" %w = get_attr "w" %y = aten::linear(%x, %w) output(%y) })",
                  std::move(state)));
    EXPECT_TRUE(at::equal(scaled->state().get("w").tensor, constant));
    EXPECT_EQ(scaled->reports.back().find(ReportKind::LeftAlone, "w")->reason,
              "its standard deviation is no positive number");
  }
}

TEST(UnitScale, NamesAComplexParameterAndLeavesWhatItMakesAlone) {
  State state;
  parameter(state, "c", at::randn({8, 8}, at::kComplexFloat));
  auto scaled = unit_scale(module_of(R"(graph {
    %x: f32[4, 8] = placeholder "x"
    %c: c64[8, 8] grad = get_attr "c"
    %w: f32[8, 8] grad = aten::real(%c)
    %y: f32[4, 8] grad = aten::linear(%x, %w)
    output(%y)
  })",
                                     state));
  const Report& report = scaled->reports.back();
  ASSERT_TRUE(report.find(ReportKind::LeftAlone, "y"));
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "y")->reason,
            "its weight is computed from c, whose scale is not its own");
  ASSERT_TRUE(report.find(ReportKind::LeftAlone, "c"));
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "c")->reason, HasSubstr("used by node %w (aten::real)"));
}

TEST(UnitScale, CountsWhatAnOutputOfATransposedConvolutionSumsOver) {
  using Expected = std::optional<int64_t>;
  for (const auto& [stride, expected] : {std::pair("[2]", Expected(6 * 4 / 2)), std::pair("[0]", Expected())}) {
    auto module = module_of(c10::str(R"(graph { %x: f32[2, 6, 8] = placeholder "x" %w: f32[6, 5, 4] grad = get_attr "w"
        %y = aten::conv_transpose1d(%x, %w, None, )",
                                     stride, ") output(%y) }"),
                            random_weights({{"w", {6, 5, 4}}}));
    EXPECT_EQ(unit_scale(module)->mup.at("w").fan_in, expected) << stride;
  }
}

TEST(UnitScale, KeepsParametersOfAGraphCapturedAgain) {
  at::manual_seed(1);
  auto module = gpt();
  UnitScaleOptions options;
  options.scale_parameters = false;
  auto scaled = unit_scale(module, options);
  for (const Attr& attr : module->state())
    EXPECT_TRUE(attr.tensor.is_same(scaled->state().get(attr.name).tensor)) << attr.name;
  EXPECT_EQ(scaled->mup.at("blocks.0.up.weight").type, MupType::Weight);
}

// --- the whole

TEST(UnitScale, LeavesAProductAloneWhoseBiasIsOneNumberForAllOutputs) {
  for (const char* product : {"aten::linear(%x, %w, %b)", "aten::addmm(%b, %x, %wt)"}) {
    Report report;
    after_scaling(c10::str(R"(graph { %x: f32[4, 16] = placeholder "x" %w: f32[32, 16] grad = get_attr "w"
        %b: f32[1] grad = get_attr "b" %wt: f32[16, 32] grad = aten::t(%w) %y: f32[4, 32] grad = )",
                           product, " output(%y) }"),
                  random_weights({{"w", {32, 16}}, {"b", {1}}}), {}, &report);
    EXPECT_THAT(report.to_text(), HasSubstr("what it adds is no bias vector")) << product;
  }
}

}  // namespace
}  // namespace plumb
