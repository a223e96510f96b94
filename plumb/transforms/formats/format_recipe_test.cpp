#include "plumb/transforms/formats/format_recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <fstream>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/formats/use_fp8.h"
#include "plumb/transforms/models_testing.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_models;

std::shared_ptr<GraphModule> two_layers() {
  torch::manual_seed(0);
  State state;
  parameter(state, "a.weight", randn_there({16, 16}));
  parameter(state, "b.weight", randn_there({16, 16}));
  return module_of(R"(graph { %x: f32[16, 16] = placeholder "x"
      %v = get_attr "a.weight" %w = get_attr "b.weight"
      %y: f32[16, 16] = aten::linear(%x, %v) in "":"Net" "a":"Linear"
      %z: f32[16, 16] = aten::linear(%y, %w) in "":"Net" "b":"Linear" output(%z) })",
                   std::move(state));
}

FormatRecipe fp8_but_b() { return {.fwd = "e4m3fn-RN", .bwd = "e5m2-RN", .products = {{"b", {}, "mxfp8e5m2-RN"}}}; }

std::vector<at::Tensor> gradients(GraphModule& graph, const at::Tensor& x) {
  std::vector<at::Tensor> parameters;
  for (const Attr& attr : graph.state()) parameters.push_back(attr.tensor);
  return torch::autograd::grad({graph(x).square().sum()}, parameters);
}

TEST(FormatRecipe, AFileIsReadAsItWasWritten) {
  FormatRecipe recipe = fp8_but_b();
  recipe.loss_scale = 4096;
  recipe.unit_scaled = true;
  recipe.products.push_back({"layers.*.\"odd\"", "bf16-RN", "none"});
  EXPECT_EQ(parse_recipe(recipe.to_toml()), recipe) << recipe.to_toml();
  EXPECT_EQ(parse_recipe(read_recipe("tensorwise").to_toml()), read_recipe("tensorwise"));
}

TEST(FormatRecipe, ANumberedProductIsItselfAlone) {
  State state;
  for (const char* name : {"a.weight", "b.weight"}) parameter(state, name, randn_there({16, 16}));
  parameter(state, "rnn.weight_ih_l0", randn_there({16, 16}));
  parameter(state, "rnn.weight_hh_l0", randn_there({16, 16}));
  const auto graph = module_of(R"(graph { %x: f32[16, 16] = placeholder "x"
      %s: f32[5, 2, 16] = placeholder "s" %h: f32[1, 2, 16] = placeholder "h"
      %v = get_attr "a.weight" %w = get_attr "b.weight" %i = get_attr "rnn.weight_ih_l0" %r = get_attr "rnn.weight_hh_l0"
      %mm: f32[16, 16] = aten::mm(%x, %x) in "":"Net"
      %y: f32[16, 16] = aten::linear(%mm, %v) in "":"Net" "mm":"Linear"
      %z, %zn = aten::rnn_tanh.input(%s, %h, [%i, %r], False, 1, 0.0, False, False, False) in "":"Net" "rnn":"RNN"
      %u, %un = aten::rnn_tanh.input(%z, %h, [%i, %r], False, 1, 0.0, False, False, False) in "":"Net" "rnn":"RNN"
      output(%y, %u) })",
                               std::move(state));
  const auto left_as_they_are = [&](const char* name) {
    Report report;
    apply_recipe(*graph->deep_copy(), {.fwd = "e4m3fn-RN", .bwd = "e5m2-RN", .products = {{name, "none", "none"}}},
                 &report);
    std::vector<std::string> nodes;
    for (const ReportEntry& entry : report.entries()) {
      if (entry.reason == kNoFormats) nodes.push_back(entry.node);
    }
    return nodes;
  };
  EXPECT_THAT(left_as_they_are("#1"), ElementsAre("mm"));
  EXPECT_THAT(left_as_they_are("mm"), ElementsAre("y"));
  EXPECT_THAT(left_as_they_are("rnn#2"), ElementsAre("u"));
  const FormatRecipe coarse{.fwd = "e4m3fn-RN", .products = {{"rnn#1", "e5m2-RN", {}}}};
  const auto made = graph->deep_copy();
  apply_recipe(*made, coarse);
  EXPECT_THAT(to_string(made->graph()), HasSubstr(R"(plumb::simulate_format(%s, "e5m2-RN", "none")"));
}

TEST(FormatRecipe, NamesStandForFormatsOfBothDirections) {
  EXPECT_EQ(read_recipe("fp8"), (FormatRecipe{.fwd = "e4m3fn-RN", .bwd = "e5m2-RN"}));
  EXPECT_EQ(read_recipe("unit-mxfp8-SR"),
            (FormatRecipe{.fwd = "mxfp8e4m3-SR", .bwd = "mxfp8e5m2-SR", .unit_scaled = true}));
  EXPECT_EQ(read_recipe("rowwise"), (FormatRecipe{.fwd = "e4m3fn-RN", .bwd = "e4m3fn-RN", .scales = "rowwise"}));
  EXPECT_EQ(read_recipe("mxfp4"), (FormatRecipe{.fwd = "mxfp4-RN", .bwd = "mxfp4-RN"}));
  EXPECT_EQ(read_recipe("e4m3fn-SR/none"), (FormatRecipe{.fwd = "e4m3fn-SR"}));
}

TEST(FormatRecipe, ErrorsNameFileLineAndWhatIsKnown) {
  const auto says = [](const std::string& text) { return message_of([&] { parse_recipe(text, "r.toml"); }); };
  EXPECT_THAT(says("fwd = \"e9m9\""), HasSubstr("r.toml:1: "));
  EXPECT_THAT(says("fwd = \"none\"\nbwd = 3"), HasSubstr("r.toml:2: bwd is no text"));
  EXPECT_THAT(says("fwd = "), HasSubstr("r.toml:1: is no TOML"));
  EXPECT_THAT(says("product = [1]"), HasSubstr("r.toml:1: product is no list of [[product]] tables"));
  EXPECT_EQ(parse_recipe("product = []", "r.toml"), FormatRecipe());
  EXPECT_THAT(says("forward = \"none\""), HasSubstr("'forward' is no key of a recipe"));
  EXPECT_THAT(says("[[product]]\nbwd = \"none\""), HasSubstr("a product has no name"));
  EXPECT_THAT(says("[[product]]\nname = \"a\"\nformat = \"none\""), HasSubstr("r.toml:3: 'format' is no key"));
  EXPECT_THAT(says("loss-scale = 1000"), HasSubstr("r.toml: the loss scale 1000 is no power of two"));
  EXPECT_THAT(says("loss-scale = 1.6069380442589903e60"),
              HasSubstr("loss scale 1.60694e+60 is beyond float32's range"));
  EXPECT_THAT(says("loss-scale = 6.223015277861142e-61"), HasSubstr("beyond float32's range"));
  EXPECT_EQ(parse_recipe("loss-scale = 8.507059173023462e37").loss_scale, 0x1p126);
  EXPECT_THAT(says("scales = \"sometimes\""), HasSubstr("'sometimes' is no recipe for FP8"));
  EXPECT_THAT(message_of([] { read_recipe("fp9"); }), HasSubstr("'fp9' is no recipe of number formats"));
  EXPECT_THAT(message_of([] { read_recipe("gone.toml"); }), HasSubstr("gone.toml"));
}

TEST(FormatRecipe, EachDirectionOfAProductHasTheFormatOfTheFirstEntryThatStatesIt) {
  const auto net = two_layers();
  simulate_format(*net, {.fwd = "mxfp4",
                         .bwd = "mxfp4",
                         .products = {{"b", {}, "bf16"}, {"b.weight", "e4m3fn", "none"}, {"a", "none", {}}}});
  net->lint();
  const std::string text = to_string(net->graph());
  EXPECT_THAT(text, HasSubstr("%y: f32[16, 16] = aten::linear(%x, %v)"));
  EXPECT_THAT(text, HasSubstr("%y_bwd: f32[16, 16] = plumb::simulate_format(%y, \"none\", \"mxfp4-RN\""));
  EXPECT_THAT(text, HasSubstr("plumb::simulate_format(%y_bwd, \"e4m3fn-RN\", \"none\")"));
  EXPECT_THAT(text, HasSubstr("plumb::simulate_format(%w, \"e4m3fn-RN\", \"none\")"));
  EXPECT_THAT(text, HasSubstr("plumb::simulate_format(%z, \"none\", \"bf16-RN\")"));
}

TEST(FormatRecipe, AValueThatProductsTakeInTwoFormatsIsRoundedToEach) {
  State state;
  parameter(state, "a.weight", randn_there({4, 4}));
  const auto net = module_of(R"(graph { %x: f32[4, 4] = placeholder "x" %w = get_attr "a.weight"
      %y: f32[4, 4] = aten::linear(%x, %w) in "":"Net" "a":"Linear"
      %z: f32[4, 4] = aten::linear(%x, %w) in "":"Net" "b":"Linear"
      %s: f32[4, 4] = aten::add.Tensor(%y, %z) output(%s) })",
                             std::move(state));
  EXPECT_THAT(product_names(*net), ElementsAre("a", "b"));
  simulate_format(*net, {.fwd = "mxfp4", .bwd = "none", .products = {{"b", "bf16", {}}}});
  net->lint();
  const std::string text = to_string(net->graph());
  EXPECT_THAT(text, HasSubstr("plumb::simulate_format(%x, \"mxfp4-RN\", \"none\""));
  EXPECT_THAT(text, HasSubstr("plumb::simulate_format(%x, \"bf16-RN\", \"none\")"));
}

TEST(FormatRecipe, ALossScaleChangesNoBitUntilSomethingIsRounded) {
  const auto net = two_layers();
  const at::Tensor x = randn_there({16, 16}) * 1e-8;
  const auto full = gradients(*net, x);
  const auto scaled = derive(*net);
  EXPECT_TRUE(scale_gradients(*scaled, 4096));
  scaled->lint();
  EXPECT_FALSE(scale_gradients(*scaled, 1));
  for (double scale : {-2.0, 0.0, 3.0, std::nan("")}) EXPECT_THROW(scale_gradients(*scaled, scale), Error) << scale;
  const auto same = gradients(*scaled, x);
  for (size_t i = 0; i < full.size(); ++i) EXPECT_TRUE(same[i].equal(full[i]));
  const auto error = [&](double scale) {
    const auto rounded = derive(*net);
    apply_recipe(*rounded, {.bwd = "e5m2", .loss_scale = scale});
    return ((gradients(*rounded, x)[0] - full[0]).norm() / full[0].norm()).item<double>();
  };
  EXPECT_GT(error(1), 0.5);
  EXPECT_LT(error(std::ldexp(1.0, 20)), 0.12);
}

TEST(FormatRecipe, UseFp8MultipliesWhatUnitsDoAndSimulatesTheRest) {
  const at::Tensor x = randn_there({16, 16});
  for (const double scale : {1.0, 4096.0}) {
    FormatRecipe recipe = fp8_but_b();
    recipe.loss_scale = scale;
    const auto simulated = two_layers(), used = two_layers();
    apply_recipe(*simulated, recipe);
    Report report("use_fp8");
    EXPECT_TRUE(use_fp8(*used, recipe, {.kernel = "decoded"}, &report));
    used->lint();
    EXPECT_EQ(report.count(ReportKind::Replaced), 1u) << report.to_text();
    EXPECT_THAT(report.to_text(), HasSubstr("no unit multiplies e4m3fn-RN forward and mxfp8e5m2-RN backward"));
    const auto a = gradients(*simulated, x), b = gradients(*used, x);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i]));
  }
}

TEST(FormatRecipe, ScaleFactorsRoundOneDirectionAlone) {
  const at::Tensor x = randn_there({16, 16});
  const auto net = two_layers();
  const auto full = gradients(*net, x);
  const auto outputs = [&](const FormatRecipe& recipe) {
    const auto changed = derive(*net);
    apply_recipe(*changed, recipe);
    changed->lint();
    return std::pair((*changed)(x), gradients(*changed, x));
  };
  const auto [back, back_gradients] = outputs({.bwd = "e5m2-RN", .scales = "tensorwise"});
  EXPECT_TRUE(back.equal((*net)(x)));
  EXPECT_FALSE(back_gradients[0].equal(full[0]));
  const auto [forth, forth_gradients] = outputs({.fwd = "e4m3fn-RN", .scales = "tensorwise"});
  EXPECT_FALSE(forth.equal((*net)(x)));
  const auto [kept, kept_gradients] =
      outputs({.bwd = "e5m2-RN", .scales = "tensorwise", .products = {{"*", {}, "none"}}});
  EXPECT_TRUE(kept_gradients[0].equal(full[0]));
}

TEST(FormatRecipe, TheReportNamesProductsThatItLeavesAlone) {
  const FormatRecipe recipe{.fwd = "e4m3fn", .bwd = "e5m2", .products = {{"b", "none", "none"}}};
  for (const bool lowered : {false, true}) {
    Report report;
    const auto net = two_layers();
    lowered ? use_fp8(*net, recipe, {}, &report) : apply_recipe(*net, recipe, &report);
    EXPECT_THAT(report.to_text(), HasSubstr("its formats are none")) << lowered;
    EXPECT_EQ(report.count(ReportKind::LeftAlone), 1u);
  }
}

TEST(FormatRecipe, PassesTakeAFileOrAName) {
  const std::string file = testing::TempDir() + "/recipe.toml";
  std::ofstream(file) << fp8_but_b().to_toml();
  const auto expected = two_layers(), given = two_layers();
  apply_recipe(*expected, fp8_but_b());
  run_pass(find_pass("simulate_format"), *given, {{"recipe", file}});
  EXPECT_EQ(to_string(given->graph()), to_string(expected->graph()));
  const auto named = two_layers(), lowered = two_layers();
  run_pass(find_pass("simulate_format"), *named, {{"recipe", "mxfp4"}});
  EXPECT_THAT(to_string(named->graph()), HasSubstr("mxfp4-RN"));
  run_pass(find_pass("use_fp8"), *lowered, {{"recipe", file}, {"kernel", "decoded"}});
  EXPECT_THAT(to_string(lowered->graph()), HasSubstr("plumb::fp8_linear"));
  for (const char* pass : {"simulate_format", "use_fp8"}) {
    EXPECT_THAT(message_of([&] { run_pass(find_pass(pass), *two_layers(), {{"recipe", file}, {"fwd", "e5m2"}}); }),
                HasSubstr(std::string(pass) + ": a recipe says all formats, so no other option goes with it"));
  }
}

TEST(FormatRecipe, RefusesProductsAndUnitScalesThatTheModelDoesNotHave) {
  FormatRecipe recipe = fp8_but_b();
  recipe.products[0].name = "head";
  EXPECT_THAT(message_of([&] { apply_recipe(*two_layers(), recipe); }),
              HasSubstr("the recipe names the product 'head', and the model has none\n  try: a, b"));
  EXPECT_THAT(message_of([&] { apply_recipe(*two_layers(), read_recipe("unit-fp8")); }),
              HasSubstr("the recipe is for a unit-scaled model"));
}

}  // namespace
}  // namespace plumb
