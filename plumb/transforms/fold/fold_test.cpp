#include "plumb/transforms/fold/fold.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/scaling/rules.h"
#include "plumb/transforms/fold/fold_equations.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_models;

// Changes the parameters as some steps of training do: no weight has unit variance, no bias is zero.
void train(GraphModule& module) {
  at::NoGradGuard no_grad;
  for (at::Tensor& p : module.parameters()) p.mul_(1.3).add_(at::randn_like(p) * 0.2);
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

// Returns the GPT with the sizes that attention's factor follows from.
std::shared_ptr<GraphModule> typed_gpt(const GptConfig& c = {}) {
  auto module = gpt(c);
  const std::vector<int64_t> heads = {c.batch, c.heads, c.length, c.width / c.heads};
  for (Node* node : module->graph().attributes())
    node->result()->set_meta(TensorMeta::of(module->state().get(node->target()).tensor));
  for (Node* node : module->graph().nodes()) {
    if (!node->is_op("aten::scaled_dot_product_attention")) continue;
    for (const char* argument : {"query", "key", "value"})
      node->arg(argument).value()->set_meta(TensorMeta{at::kFloat, heads, contiguous_strides(heads)});
  }
  return module;
}

// Returns the first parameter whose name ends so.
std::string named(const GraphModule& module, const std::string& ending) {
  for (const Attr& attr : module.state()) {
    if (attr.name.ends_with(ending)) return attr.name;
  }
  return "no parameter " + ending;
}

struct Folded {
  std::shared_ptr<TransformedModule> scaled, plain;
  const Report& report() const { return plain->reports.back(); }
};

// Expects the unit-scaled results of `module` to equal those of its own graph with the folded weights.
Folded expect_folds(const std::shared_ptr<GraphModule>& module, const std::vector<c10::IValue>& inputs,
                    double tolerance = 2e-5) {
  at::manual_seed(3);
  Folded f;
  f.scaled = unit_scale(module);
  train(*f.scaled);
  const auto wanted = f.scaled->run(inputs);
  f.plain = fold(f.scaled);
  const auto rewritten = f.plain->run(inputs);
  auto original = module->deep_copy();
  std::vector<std::pair<std::string, at::Tensor>> weights;
  for (const Attr& attr : f.plain->state()) weights.emplace_back(attr.name, attr.tensor);
  original->set_state(weights);
  const auto loaded = original->run(inputs);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_LT(largest_difference(rewritten[i].toTensor(), wanted[i].toTensor()), tolerance)
        << "rewritten, output " << i;
    if (f.report().count(ReportKind::Remains)) continue;
    EXPECT_LT(largest_difference(loaded[i].toTensor(), wanted[i].toTensor()), tolerance)
        << "loaded, output " << i << "\n"
        << f.report().to_text();
  }
  const std::string text = to_string(f.plain->graph());
  EXPECT_THAT(text, testing::Not(HasSubstr("plumb::"))) << f.report().to_text();
  return f;
}

TEST(Fold, GivesAPlainGptWithTheFunctionOfTheUnitScaledOne) {
  for (bool tied : {true, false}) {
    at::manual_seed(1);
    GptConfig config;
    config.tied = tied;
    const Folded f = expect_folds(typed_gpt(config), gpt_inputs(config));
    auto entry = [&](const char* ending) { return f.report().find(ReportKind::Folded, named(*f.plain, ending)); };
    const std::string embedding = f.plain->state().names(AttrKind::Parameter)[0];
    EXPECT_EQ(f.report().count(ReportKind::Remains), 0u) << f.report().to_text();
    EXPECT_NE(entry("qkv.weight"), nullptr);
    // The embeddings take the factor of their sum, and the last norm the head's where that is an embedding, too.
    EXPECT_EQ(f.report().find(ReportKind::Folded, embedding)->from, "divided by 1.41421") << f.report().to_text();
    const std::string& last_norm = f.plain->graph().find_value("normed")->producer()->input(1)->producer()->target();
    EXPECT_EQ(f.report().find(ReportKind::Folded, last_norm) != nullptr, tied);
    EXPECT_EQ(f.report().find(ReportKind::Folded, named(*f.plain, "0.ln_1.weight")), nullptr);
    EXPECT_EQ(f.report().find(ReportKind::Folded, named(*f.plain, "0.ln1.weight")), nullptr);
    EXPECT_THAT(f.report().find(ReportKind::Replaced, "att0")->reason, HasSubstr("a length of 32"));
    EXPECT_TRUE(f.plain->mup.empty());
    for (const Attr& attr : f.plain->state()) EXPECT_FALSE(parameter_data(attr.tensor)) << attr.name;
  }
}

// A row of the table is all that one needs.
TEST(Fold, EveryFunctionOfEachElementGoesThereAndBack) {
  for (const ElementwiseFunction& function : elementwise_functions()) {
    const std::string name(function.name);
    SCOPED_TRACE(name);
    at::manual_seed(4);
    State state;
    parameter(state, "w", randn_there({8, 4}));
    parameter(state, "v", randn_there({3, 8}));
    const Folded f = expect_folds(module_of(R"(graph {
      %x: f32[5, 4] = placeholder "x"
      %w = get_attr "w"
      %v = get_attr "v"
      %l: f32[5, 8] = aten::linear(%x, %w)
      %y: f32[5, 8] = aten::)" + name + R"((%l)
      %out: f32[5, 3] = aten::linear(%y, %v)
      output(%out)
    })",
                                            state),
                                  {randn_there({5, 4})});
    EXPECT_THAT(to_string(f.scaled->graph()), HasSubstr("plumb::" + name + "(%l"));
    EXPECT_EQ(f.report().count(ReportKind::Remains), 0u) << f.report().to_text();
  }
  EXPECT_THROW(find_elementwise("plumb::softsign"), Error);
}

TEST(Fold, LoadsNothingLikeTheFunctionWithoutFolding) {
  at::manual_seed(1);
  auto module = typed_gpt();
  auto scaled = unit_scale(module);
  train(*scaled);
  const auto inputs = gpt_inputs();
  const at::Tensor wanted = scaled->run(inputs)[1].toTensor();
  auto original = module->deep_copy();
  std::vector<std::pair<std::string, at::Tensor>> weights;
  for (const Attr& attr : scaled->state()) weights.emplace_back(attr.name, attr.tensor);
  original->set_state(weights);
  EXPECT_GT(largest_difference(original->run(inputs)[1].toTensor(), wanted), 1);
}

TEST(Fold, FoldsConvolutionsNormsWithStatisticsAndPools) {
  for (const char* training : {"False", "True"}) {
    at::manual_seed(2);
    State state;
    parameter(state, "k", randn_there({8, 3, 3, 3}) * 0.05);
    parameter(state, "g", ones_there({8}));
    parameter(state, "h", zeros_there({8}));
    parameter(state, "u", randn_there({8, 4, 2, 2}) * 0.05);
    parameter(state, "v", randn_there({4}));
    state.add({"mean", AttrKind::Buffer, randn_there({8}) * 0.3});
    state.add({"var", AttrKind::Buffer, rand_there({8}) + 0.5});
    const Folded f = expect_folds(module_of(std::string(R"(graph {
      %x: f32[4, 3, 8, 8] = placeholder "x"
      %k = get_attr "k"
      %g = get_attr "g"
      %h = get_attr "h"
      %u = get_attr "u"
      %v = get_attr "v"
      %mean = get_attr "mean"
      %var = get_attr "var"
      %c: f32[4, 8, 8, 8] = aten::conv2d.padding(%x, %k, None, 1, "same")
      %n: f32[4, 8, 8, 8] = aten::batch_norm(%c, %g, %h, %mean, %var, )") +
                                                training + R"(, 0.1, 1e-05, True)
      %r: f32[4, 8, 8, 8] = aten::relu(%n)
      %p: f32[4, 8, 4, 4] = aten::max_pool2d(%r, [2, 2])
      %a: f32[4, 8, 2, 2] = aten::avg_pool2d(%p, [2, 2])
      %t: f32[4, 4, 4, 4] = aten::conv_transpose2d.input(%a, %u, %v, 2)
      output(%t)
    })",
                                            state),
                                  {randn_there({4, 3, 8, 8})});
    EXPECT_EQ(f.report().count(ReportKind::Remains), 0u) << f.report().to_text();
    EXPECT_NE(f.report().find(ReportKind::Folded, "u"), nullptr);
    EXPECT_NE(f.report().find(ReportKind::Folded, "v"), nullptr);
  }
}

TEST(Fold, DividesStatisticsOfANormWhoseInputNoWeightCanTake) {
  at::manual_seed(2);
  State state;
  parameter(state, "w", randn_there({8, 8}));
  state.add({"mean", AttrKind::Buffer, randn_there({8}) * 0.3});
  state.add({"var", AttrKind::Buffer, rand_there({8}) + 0.5});
  const Folded f = expect_folds(module_of(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %w = get_attr "w"
      %mean = get_attr "mean"
      %var = get_attr "var"
      %g: f32[4, 8] = aten::gelu(%x)
      %n: f32[4, 8] = aten::batch_norm(%g, None, None, %mean, %var, False, 0.1, 1e-05, True)
      %y: f32[4, 8] = aten::linear(%n, %w)
      output(%y)
    })",
                                          state),
                                {randn_there({4, 8})}, 1e-4);
  const ReportEntry* mean = f.report().find(ReportKind::Folded, "mean");
  ASSERT_NE(mean, nullptr) << f.report().to_text();
  EXPECT_NE(f.report().find(ReportKind::Folded, "var"), nullptr);
  const double factor =
      f.scaled->state().get("mean").tensor[0].item<double>() / f.plain->state().get("mean").tensor[0].item<double>();
  const double squared =
      f.scaled->state().get("var").tensor[0].item<double>() / f.plain->state().get("var").tensor[0].item<double>();
  EXPECT_NEAR(squared, factor * factor, 1e-4);
}

// Two layers with attention and norms as libraries spell them out: eps is added, gates multiply, positions rotate.
constexpr const char* kSpelledOut = R"(graph {
      %x: f32[2, 6, 8] = placeholder "x"
      %cos: f32[6, 8] = placeholder "cos"
      %in = get_attr "in"
      %gain = get_attr "gain"
      %q = get_attr "q"
      %k = get_attr "k"
      %v = get_attr "v"
      %o = get_attr "o"
      %gate = get_attr "gate"
      %up = get_attr "up"
      %down = get_attr "down"
      %e: f32[2, 6, 8] = aten::linear(%x, %in)
      %s: f32[2, 6, 8] = aten::pow.Tensor_Scalar(%e, 2)
      %m: f32[2, 6, 1] = aten::mean.dim(%s, [-1], True)
      %a: f32[2, 6, 1] = aten::add.Tensor(%m, 1e-06)
      %i: f32[2, 6, 1] = aten::rsqrt(%a)
      %h0: f32[2, 6, 8] = aten::mul.Tensor(%e, %i)
      %h: f32[2, 6, 8] = aten::mul.Tensor(%h0, %gain)
      %q0: f32[2, 6, 8] = aten::linear(%h, %q)
      %q1: f32[2, 6, 8] = aten::mul.Tensor(%q0, %cos)
      %k0: f32[2, 6, 8] = aten::linear(%h, %k)
      %v0: f32[2, 6, 8] = aten::linear(%h, %v)
      %kt: f32[2, 8, 6] = aten::transpose.int(%k0, 1, 2)
      %l: f32[2, 6, 6] = aten::matmul(%q1, %kt)
      %ls: f32[2, 6, 6] = aten::div.Tensor(%l, 2.8)
      %p: f32[2, 6, 6] = aten::softmax.int(%ls, -1)
      %c: f32[2, 6, 8] = aten::matmul(%p, %v0)
      %c0: f32[2, 6, 8] = aten::linear(%c, %o)
      %r: f32[2, 6, 8] = aten::add.Tensor(%e, %c0)
      %g0: f32[2, 6, 16] = aten::linear(%r, %gate)
      %g1: f32[2, 6, 16] = aten::silu(%g0)
      %u0: f32[2, 6, 16] = aten::linear(%r, %up)
      %f: f32[2, 6, 16] = aten::mul.Tensor(%g1, %u0)
      %d: f32[2, 6, 8] = aten::linear(%f, %down)
      %y: f32[2, 6, 8] = aten::add.Tensor(%r, %d)
      output(%y)
    })";

State spelled_out_state() {
  State state;
  const std::initializer_list<std::pair<const char*, std::vector<int64_t>>> shapes = {
      {"in", {8, 8}}, {"gain", {8}},     {"q", {8, 8}},   {"k", {8, 8}},    {"v", {8, 8}},
      {"o", {8, 8}},  {"gate", {16, 8}}, {"up", {16, 8}}, {"down", {8, 16}}};
  for (const auto& [name, sizes] : shapes) parameter(state, name, randn_there(sizes) * 0.3 + 0.05);
  return state;
}

TEST(Fold, ReplacesTheSoftmaxOfANumber) {
  GraphModule module(parse_graph(R"(graph {
      %x: f32[] = placeholder "x"
      %p: f32[] = plumb::softmax(%x, 0)
      output(%p)
    })"),
                     {}, TreeSpec::positional_inputs(1), TreeSpec::leaf());
  EXPECT_TRUE(fold(module));
  EXPECT_EQ(to_string(module.graph()).find("plumb::"), std::string::npos) << to_string(module.graph());
}

TEST(Fold, FollowsSpelledOutNormsGatesAndAttention) {
  at::manual_seed(4);
  const Folded f =
      expect_folds(module_of(kSpelledOut, spelled_out_state()), {randn_there({2, 6, 8}), rand_there({6, 8})}, 1e-4);
  EXPECT_EQ(f.report().count(ReportKind::Remains), 0u) << f.report().to_text();
}

// A norm of vision models: each channel by a gain and a shift, in one operator.
TEST(Fold, FollowsAShiftAndAGainInOneOperator) {
  at::manual_seed(4);
  State state;
  for (const char* name : {"up", "down"}) parameter(state, name, randn_there({8, 8}) * 0.3);
  for (const char* name : {"gain", "shift"}) parameter(state, name, randn_there({8}));
  const Folded f = expect_folds(module_of(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %up = get_attr "up"
      %down = get_attr "down"
      %gain = get_attr "gain"
      %shift = get_attr "shift"
      %u: f32[4, 8] = aten::linear(%x, %up)
      %g: f32[4, 8] = aten::gelu(%u)
      %a: f32[4, 8] = aten::addcmul(%shift, %gain, %g)
      %y: f32[4, 8] = aten::linear(%a, %down)
      output(%y)
    })",
                                          state),
                                {randn_there({4, 8})});
  EXPECT_EQ(f.report().count(ReportKind::Remains), 0u) << f.report().to_text();
}

TEST(Fold, FoldsRecurrentLayers) {
  at::manual_seed(5);
  State state;
  for (const auto& [name, sizes] : std::initializer_list<std::pair<const char*, std::vector<int64_t>>>{
           {"w_ih", {32, 6}}, {"w_hh", {32, 8}}, {"b_ih", {32}}, {"b_hh", {32}}, {"head", {3, 8}}})
    parameter(state, name, randn_there(sizes) * 0.2);
  const Folded f = expect_folds(module_of(R"(graph {
      %x: f32[5, 4, 6] = placeholder "x"
      %w_ih: f32[32, 6] = get_attr "w_ih"
      %w_hh: f32[32, 8] = get_attr "w_hh"
      %b_ih: f32[32] = get_attr "b_ih"
      %b_hh: f32[32] = get_attr "b_hh"
      %head: f32[3, 8] = get_attr "head"
      %h: f32[1, 4, 8] = aten::zeros([1, 4, 8])
      %y: f32[5, 4, 8], %hn: f32[1, 4, 8], %cn: f32[1, 4, 8] = aten::lstm.input(%x, [%h, %h], [%w_ih, %w_hh, %b_ih, %b_hh], True, 1, 0.0, False, False, False)
      %z: f32[5, 4, 3] = aten::linear(%y, %head)
      output(%z)
    })",
                                          state),
                                {randn_there({5, 4, 6})});
  EXPECT_EQ(f.report().count(ReportKind::Remains), 0u) << f.report().to_text();
}

TEST(Fold, KeepsAMultiplicationForATensorThatMustHaveTwoFactors) {
  at::manual_seed(6);
  State state;
  parameter(state, "w", randn_there({8, 8}));
  // gelu needs the embedding as it is, and the head its factor.
  const Folded f = expect_folds(module_of(R"(graph {
      %ids: i64[5] = placeholder "ids"
      %w = get_attr "w"
      %e: f32[5, 8] = aten::embedding(%w, %ids)
      %g: f32[5, 8] = aten::gelu(%e)
      %y: f32[5, 8] = aten::linear(%g, %w) in "":"Net" "head":"Linear"
      output(%y)
    })",
                                          state),
                                {there(at::arange(5))});
  EXPECT_EQ(f.report().count(ReportKind::Remains), 1u) << f.report().to_text();
  EXPECT_THAT(f.report().to_text(), HasSubstr("remains output %y times 0.62"));
  EXPECT_THAT(f.report().to_text(), HasSubstr("no parameter before it is free to take the factor"));
}

TEST(Fold, LeavesAPlainGraphAlone) {
  auto module = gpt();
  const std::string before = to_string(module->graph());
  Report report;
  EXPECT_FALSE(fold(*module, &report));
  EXPECT_EQ(to_string(module->graph()), before);
  EXPECT_TRUE(report.entries().empty()) << report.to_text();
}

TEST(Fold, LeavesOutRoundingAndMeasuring) {
  at::manual_seed(1);
  auto scaled = unit_scale(typed_gpt());
  auto fp8 = track_scales(simulate_format(scaled, {.fwd = "e4m3fn-RN", .bwd = "e5m2-RN"}));
  auto plain = fold(fp8), of_scaled = fold(scaled);
  const auto inputs = gpt_inputs();
  EXPECT_LT(largest_difference(plain->run(inputs)[1].toTensor(), of_scaled->run(inputs)[1].toTensor()), 2e-5);
  EXPECT_THAT(to_string(plain->graph()), testing::Not(HasSubstr("plumb::")));
  EXPECT_THAT(plain->reports.back().to_text(), HasSubstr("it only rounds or measures"));
  EXPECT_EQ(plain->tracker, nullptr);
}

TEST(Fold, KeepsOperatorsWhoseFactorsFollowFromSymbols) {
  State state;
  auto module = module_of(R"(graph {
      %q: f32[2, "s0"=6, 8] = placeholder "q"
      %y: f32[2, "s0"=6, 8] = plumb::scaled_dot_product_attention(%q, %q, %q)
      output(%y)
    })");
  Report report;
  fold(*module, &report);
  EXPECT_THAT(to_string(module->graph()), HasSubstr("plumb::scaled_dot_product_attention"));
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "y")->reason, HasSubstr("symbols"));
}

TEST(Fold, RunsFromTheTableOfPasses) {
  auto module = typed_gpt();
  unit_scale(*module, {});
  std::vector<std::string> lines;
  EXPECT_TRUE(run_pass(find_pass("fold"), *module, {}, &lines, true));
  EXPECT_THAT(lines, testing::Contains(HasSubstr("qkv.weight divided by")));
  for (const Attr& attr : module->state()) EXPECT_FALSE(parameter_data(attr.tensor)) << attr.name;
}

TEST(FactorEquations, DecideTheUnknownOfTheHigherRankAndFindContradictions) {
  FactorEquations equations;
  const LogFactor embedding = equations.add_unknown(1), weight = equations.add_unknown(3);
  EXPECT_TRUE(equations.equate(embedding + weight, 2.0));  // decides the weight
  EXPECT_EQ(equations.highest_rank(weight), 1);
  EXPECT_TRUE(equations.equate(weight * 2, 1.0));  // and so the embedding
  EXPECT_DOUBLE_EQ(equations.value(embedding), 1.5);
  EXPECT_DOUBLE_EQ(equations.value(weight), 0.5);
  EXPECT_FALSE(equations.equate(embedding, 1.0));
  EXPECT_TRUE(equations.equate(embedding - weight, 1.0));
  EXPECT_EQ(equations.highest_rank(weight), std::nullopt);
}

}  // namespace
}  // namespace plumb
