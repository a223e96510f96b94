#include "plumb/transforms/formats/use_fp8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/numerics/operators.h"
#include "plumb/scaling/fp8.h"
#include "plumb/scaling/fp8_recipes.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using namespace testing_models;

std::string lowered(const std::string& text, State state = {}, const UseFp8Options& options = {},
                    Report* report = nullptr) {
  auto module = module_of(text, std::move(state));
  use_fp8(*module, options, report);
  module->lint();
  return to_string(module->graph());
}

State random_weights(std::initializer_list<std::pair<const char*, std::vector<int64_t>>> parameters) {
  State state;
  for (const auto& [name, sizes] : parameters) parameter(state, name, randn_there(sizes));
  return state;
}

std::shared_ptr<TransformedModule> simulated_as_fp8(const std::shared_ptr<GraphModule>& module) {
  SimulateFormatOptions options;
  options.fwd = "e4m3fn-RN", options.bwd = "e5m2-RN";
  return simulate_format(module, options);
}

struct Fp8Results {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
};

Fp8Results fp8_results(const std::shared_ptr<GraphModule>& module, const std::vector<at::Tensor>& inputs) {
  for (auto& p : module->parameters()) p.mutable_grad() = at::Tensor();
  std::vector<c10::IValue> given(inputs.begin(), inputs.end());
  Fp8Results results;
  results.loss = module->run(given)[0].toTensor();
  (results.loss.numel() == 1 ? results.loss : (results.loss * results.loss.detach().sin()).sum()).backward();
  for (const auto& p : module->parameters()) results.gradients.push_back(p.grad().clone());
  return results;
}

void expect_same_fp8_bits(const Fp8Results& a, const Fp8Results& b, const std::string& what) {
  EXPECT_TRUE(at::equal(a.loss, b.loss)) << what;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i])) << what << ", gradient " << i;
}

TEST(UseFp8, MakesALinearLayerAProductOfCodes) {
  EXPECT_EQ(lowered(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b"
      %y: f32[4, 3] = aten::linear(%x, %w, %b) %z = aten::relu(%y) output(%z) })",
                    random_weights({{"w", {3, 8}}, {"b", {3}}})),
            to_string(parse_graph(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %w = get_attr "w"
      %b = get_attr "b"
      %x_codes: u8[4, 8] = plumb::encode(%x, "e4m3fn-RN")
      %w_codes = plumb::encode_weight(%w, "e4m3fn-RN")
      %y: f32[4, 3] = plumb::fp8_linear(%x, %w, %b, %x_codes, %w_codes, "e4m3fn-RN", "e5m2-RN", scales=[1.0, 1.0, 1.0])
      %z = aten::relu(%y)
      output(%z)
    })")));
}

TEST(UseFp8, CastsAValueOnceForSeveralProducts) {
  const std::string text = lowered(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %v = get_attr "v"
      %a = aten::linear(%x, %w) %b = aten::linear(%x, %v) output(%a, %b) })",
                                   random_weights({{"w", {8, 8}}, {"v", {8, 8}}}));
  EXPECT_EQ(text.find("plumb::encode(%x"), text.rfind("plumb::encode(%x")) << text;
  EXPECT_THAT(text, Not(HasSubstr("simulate_format")));
}

TEST(UseFp8, HasTheBitsOfTheSimulationForEveryFormOfAProduct) {
  at::manual_seed(3);
  struct Case {
    const char* what;
    const char* text;
    State state;
    std::vector<at::Tensor> inputs;
  };
  const std::vector<Case> cases = {
      {"linear of three dimensions",
       R"(graph { %x: f32[3, 5, 24] = placeholder "x" %w = get_attr "w" %b = get_attr "b"
        %y = aten::linear(%x, %w, %b) output(%y) })",
       random_weights({{"w", {40, 24}}, {"b", {40}}}),
       {randn_there({3, 5, 24}).requires_grad_()}},
      {"addmm with a transposed weight, odd sizes",
       R"(graph { %x: f32[65, 33] = placeholder "x" %w: f32[17, 33] = get_attr "w" %b: f32[17] = get_attr "b"
        %t = aten::t(%w) %y = aten::addmm(%b, %x, %t) output(%y) })",
       random_weights({{"w", {17, 33}}, {"b", {17}}}),
       {randn_there({65, 33}).requires_grad_()}},
      {"addmm with a weight that lies row by row",
       R"(graph { %x: f32[64, 512] = placeholder "x" %w: f32[512, 96] = get_attr "w" %b: f32[96] = get_attr "b"
        %y = aten::addmm(%b, %x, %w) output(%y) })",
       random_weights({{"w", {512, 96}}, {"b", {96}}}),
       {randn_there({64, 512}).requires_grad_()}},
      {"mm",
       R"(graph { %x: f32[7, 640] = placeholder "x" %w = get_attr "w" %y = aten::mm(%x, %w) output(%y) })",
       random_weights({{"w", {640, 48}}}),
       {randn_there({7, 640}).requires_grad_()}},
      {"bmm",
       R"(graph { %x: f32[6, 32, 16] = placeholder "x" %k: f32[6, 16, 48] = placeholder "k" %w = get_attr "w"
        %s = aten::mul.Tensor(%k, %w) %y = aten::bmm(%x, %s) output(%y) })",
       random_weights({{"w", {48}}}),
       {randn_there({6, 32, 16}).requires_grad_(), randn_there({6, 16, 48})}},
      {"matmul over a batch",
       R"(graph { %x: f32[2, 3, 32, 16] = placeholder "x" %k: f32[3, 16, 48] = placeholder "k" %w = get_attr "w"
        %s = aten::mul.Tensor(%k, %w) %y = aten::matmul(%x, %s) output(%y) })",
       random_weights({{"w", {48}}}),
       {randn_there({2, 3, 32, 16}).requires_grad_(), randn_there({3, 16, 48})}},
      {"unit-scaled linear",
       R"(graph { %x: f32[64, 200] = placeholder "x" %w = get_attr "w" %b = get_attr "b"
        %y = plumb::linear(%x, %w, %b, constraint="to_output_scale") output(%y) })",
       random_weights({{"w", {40, 200}}, {"b", {40}}}),
       {randn_there({64, 200}).requires_grad_()}},
      {"unit-scaled readout and matmul",
       R"(graph { %x: f32[64, 48] = placeholder "x" %w = get_attr "w"
        %y = plumb::linear_readout(%x, %w) %t = aten::t(%y) %z = plumb::matmul(%t, %y, constraint=None) output(%z) })",
       random_weights({{"w", {40, 48}}}),
       {randn_there({64, 48}).requires_grad_()}},
      {"a batch with no rows",
       R"(graph { %x: f32[0, 48] = placeholder "x" %w = get_attr "w" %y = aten::linear(%x, %w) output(%y) })",
       random_weights({{"w", {40, 48}}}),
       {randn_there({0, 48}).requires_grad_()}},
  };
  for (const auto& c : cases) {
    auto module = module_of(c.text, c.state);
    Report report;
    auto fp8 = use_fp8(module);
    EXPECT_THAT(to_string(fp8->graph()), Not(HasSubstr("simulate_format"))) << c.what;
    expect_same_fp8_bits(fp8_results(fp8, c.inputs), fp8_results(simulated_as_fp8(module), c.inputs), c.what);
  }
}

TEST(UseFp8, TrainsTheGptWithTheBitsOfTheSimulation) {
  const at::Tensor ids = there(at::randint(96, {8, 32}, at::kLong)),
                   targets = there(at::randint(96, {8, 32}, at::kLong));
  for (const bool scaled : {false, true}) {
    auto train = [&](auto transform, int steps = 50) {
      at::manual_seed(1);
      std::shared_ptr<GraphModule> module = gpt();
      if (scaled) module = unit_scale(module);
      module = transform(module);
      torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(scaled ? 0.05 : 0.003));
      std::vector<float> losses;
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        const at::Tensor loss = module->run({ids, targets})[0].toTensor();
        loss.backward();
        optimizer.step();
        losses.push_back(loss.item<float>());
      }
      return losses;
    };
    const auto expected = train(simulated_as_fp8);
    EXPECT_EQ(train([](const auto& m) { return use_fp8(m); }), expected);
    EXPECT_LT(expected.back(), expected.front() - 0.5f);
    UseFp8Options torchs;
    torchs.kernel = "scaled_mm";
    try {
      // Sums in another order. oneDNN's own product takes half a second a step on CPUs without units for FP8.
      const auto by_torch = train([&](const auto& m) { return use_fp8(m, torchs); }, 5);
      EXPECT_NEAR(by_torch.back(), expected[4], 0.01 * expected[4]);
    } catch (const Error& refused) {  // oneDNN may not use this CPU's units
      EXPECT_THAT(refused.what(), HasSubstr("kernel=\"scaled_mm\": torch cannot multiply FP8 on"));
    }
  }
}

TEST(UseFp8, SaysWhatStaysSimulatedAndWhatIsFilledUp) {
  Report report;
  const std::string text = lowered(R"(graph {
      %x: f32[1, 2, 4, 4] = placeholder "x" %m: f32[4, 65] = placeholder "m" %v: f32[65] = placeholder "v"
      %k = get_attr "k" %w: f32[65, 32] = get_attr "w" %b: f32[4, 32] = get_attr "b"
      %c = aten::conv2d(%x, %k, None, 1, 1)
      %a = aten::scaled_dot_product_attention(%c, %c, %c)
      %e = aten::einsum("bhij,bhjk->bhik", [%a, %a])
      %f = aten::mv(%m, %v)
      %g = aten::addmm(%b, %m, %w)
      %h: f32[4, 32] = aten::mm(%m, %w)
      output(%e, %f, %g, %h)
    })",
                                   random_weights({{"k", {2, 2, 3, 3}}, {"w", {65, 32}}, {"b", {4, 32}}}), {}, &report);
  auto reason = [&](ReportKind kind, const char* node) {
    const ReportEntry* entry = report.find(kind, node);
    return entry ? entry->reason : "no entry";
  };
  EXPECT_EQ(reason(ReportKind::Quantised, "c"), "stays simulated: no FP8 kernel for convolutions");
  EXPECT_EQ(reason(ReportKind::Quantised, "a"), "stays simulated: no FP8 kernel for attention");
  EXPECT_EQ(reason(ReportKind::Quantised, "e"), "stays simulated: no FP8 kernel for this operator");
  EXPECT_EQ(reason(ReportKind::Quantised, "f"), "stays simulated: no FP8 kernel for this operator");
  EXPECT_EQ(reason(ReportKind::Quantised, "g"), "stays simulated: what it adds is no vector");
  EXPECT_EQ(reason(ReportKind::Replaced, "h"),
            "e4m3fn-RN forward, e5m2-RN backward; FP8 units get zeros up to a multiple of 16 of: rows 4, in 65");
  EXPECT_THAT(text, HasSubstr("%h: f32[4, 32] = plumb::fp8_matmul(%m_fwd, %w_fwd, None, %m_codes, %w_codes"))
      << "gradients are summed with those of the products that stay simulated";
}

TEST(UseFp8, LeavesAProductWhoseBiasIsOneNumberForAllOutputsToTorch) {
  for (const char* product : {"aten::linear(%x, %w, %b)", "aten::addmm(%b, %x, %wt)"}) {
    for (const char* recipe : {"", "rowwise", "delayed"}) {
      const auto module = module_of(c10::str(R"(graph { %x: f32[4, 16] = placeholder "x" %w: f32[32, 16] = get_attr "w"
          %b: f32[1] = get_attr "b" %wt: f32[16, 32] = aten::t(%w) %y: f32[4, 32] = )",
                                             product, " output(%y) }"),
                                    random_weights({{"w", {32, 16}}, {"b", {1}}}));
      const auto fp8 = use_fp8(module, {.recipe = recipe});
      EXPECT_THAT(to_string(fp8->graph()), Not(HasSubstr("plumb::fp8_"))) << product << " " << recipe;
      EXPECT_THAT(fp8->reports[0].to_text(), HasSubstr("what it adds is no number for each output"));
      EXPECT_EQ(fp8->run({randn_there({4, 16})})[0].toTensor().sizes(), at::IntArrayRef({4, 32}));
    }
  }
}

TEST(UseFp8, SumsTheGradientsOfAValuesProductsBeforeThoseOfItsOtherUsers) {
  const std::string text = R"(graph { %x: f32[32, 16] = placeholder "x" %e: f32[16, 16] grad = get_attr "e"
      %q: f32[16, 16] grad = get_attr "q" %k: f32[16, 16] grad = get_attr "k"
      %h: f32[32, 16] grad = aten::mm(%x, %e) %a: f32[32, 16] grad = aten::linear(%h, %q)
      %b: f32[32, 16] grad = aten::linear(%h, %k) %m: f32[32, 16] grad = aten::mul.Tensor(%a, %b)
      %y: f32[32, 16] grad = aten::add.Tensor(%h, %m) output(%y) })";
  at::manual_seed(3);
  const auto module = module_of(text, random_weights({{"e", {16, 16}}, {"q", {16, 16}}, {"k", {16, 16}}}));
  const auto fp8 = use_fp8(module);
  EXPECT_THAT(to_string(fp8->graph()), HasSubstr(" = aten::alias(%h)"));
  EXPECT_THAT(to_string(fp8->graph()), HasSubstr("plumb::fp8_linear(%alias, %k, "));
  const at::Tensor x = randn_there({32, 16});
  expect_same_fp8_bits(fp8_results(fp8, {x}), fp8_results(simulated_as_fp8(module), {x}), "");
  drop_fp8(*fp8);
  EXPECT_THAT(to_string(fp8->graph()), Not(AnyOf(HasSubstr("alias"), HasSubstr("plumb::"))));
  expect_same_fp8_bits(fp8_results(fp8, {x}), fp8_results(module, {x}), "dropped");
}

TEST(UseFp8, DrawsForAGradientOnce) {
  UseFp8Options options;
  options.bwd = "e5m2-SR";
  const std::string text = R"(graph { %x: f32[32, 16] = placeholder "x" %w: f32[16, 16] grad = get_attr "w"
      %y: f32[32, 16] grad = aten::linear(%x, %w) output(%y) })";
  const auto module = module_of(text, random_weights({{"w", {16, 16}}}));
  const auto fp8 = use_fp8(module, options);
  EXPECT_THAT(to_string(fp8->graph()), HasSubstr("\"e4m3fn-RN\", \"e5m2-RN\", scales"));
  EXPECT_THAT(to_string(fp8->graph()), HasSubstr("plumb::simulate_format(%y, \"none\", \"e5m2-SR\")"));
  drop_fp8(*fp8);
  EXPECT_THAT(to_string(fp8->graph()), Not(HasSubstr("plumb::")));
}

TEST(UseFp8, IsNotRoundedAgain) {
  auto module = module_of(R"(graph { %x: f32[4, 16] = placeholder "x" %w = get_attr "w"
      %y = aten::linear(%x, %w) output(%y) })",
                          random_weights({{"w", {16, 16}}}));
  auto fp8 = use_fp8(module);
  const std::string before = to_string(fp8->graph());
  Report report;
  EXPECT_FALSE(use_fp8(*fp8, {}, &report));
  EXPECT_EQ(to_string(fp8->graph()), before);
  EXPECT_EQ(report.entries().at(0).reason, "it multiplies FP8 already");
}

TEST(UseFp8, StandsInTheTableOfPassesAndRefusesWhatNoUnitMultiplies) {
  auto module = module_of(R"(graph { %x: f32[4, 16] = placeholder "x" %w = get_attr "w"
      %y = aten::linear(%x, %w) output(%y) })",
                          random_weights({{"w", {16, 16}}}));
  for (const auto& [options, what] : std::vector<std::pair<UseFp8Options, std::string>>{
           {{"E4M3"}, "no unit multiplies the format E4M3"},
           {{"e4m3fn", "mxfp8"}, "no unit multiplies the format mxfp8"},
           {{"e4m3fn", "none"}, "none"},
           {{"e4m3fn", "e5m2", "tensor cores"}, "'tensor cores' is no kernel"},
           {{"e4m3fn", "e5m2", "auto", {"aten::relu"}}, "'aten::relu' is no matrix product"},
           {{.operators = {"aten::relu"}, .recipe = "tensorwise"}, "'aten::relu' is no matrix product"}}) {
    try {
      use_fp8(module, options);
      FAIL() << what;
    } catch (const Error& e) {
      EXPECT_THAT(e.message(), HasSubstr(what));
    }
  }
  run_passes({parse_pass_step("use_fp8,fwd=e5m2")}, *module);
  EXPECT_THAT(to_string(module->graph()), HasSubstr("plumb::fp8_linear"));
}

TEST(UseFp8, KnowsAnOperatorByBothItsNamesWithScaleFactorsToo) {
  for (const char* name : {"linear", "aten::linear", "plumb::linear"}) {
    for (const char* recipe : {"", "rowwise"}) {
      auto module = module_of(R"(graph { %x: f32[4, 16] = placeholder "x" %w = get_attr "w"
          %y = aten::linear(%x, %w) output(%y) })",
                              random_weights({{"w", {16, 16}}}));
      EXPECT_TRUE(use_fp8(*module, {.operators = {name}, .recipe = recipe})) << name << " " << recipe;
    }
  }
}

TEST(UseFp8, TakesTheHistoryForTheScalesOfARecipeFile) {
  auto module = module_of(R"(graph { %x: f32[4, 16] = placeholder "x" %w = get_attr "w"
      %y = aten::linear(%x, %w) output(%y) })",
                          random_weights({{"w", {16, 16}}}));
  const FormatRecipe recipe{.fwd = "e4m3fn", .bwd = "e5m2", .scales = "delayed"};
  ASSERT_TRUE(use_fp8(*module, recipe, {.history = 5}));
  EXPECT_EQ(module->state().get("w_fp8_state").tensor.sizes(), at::IntArrayRef({3, 6}));
}

TEST(UseFp8, GivesEveryWeightAStateOfDelayedScaling) {
  const std::string text =
      "graph {\n  %x: f32[4, 16] = placeholder \"x\"\n  %w: f32[16, 16] grad = get_attr \"up.weight\"\n"
      "  %y: f32[4, 16] grad = aten::linear(%x, %w, None)\n  %z: f32[4, 16] grad = aten::linear(%y, %w, None)\n"
      "  output(%z)\n}\n";
  at::manual_seed(0);
  auto module = module_of(text, random_weights({{"up.weight", {16, 16}}}));
  module->set_made_in_training(true);
  UseFp8Options options;
  options.recipe = "delayed", options.history = 5;
  ASSERT_TRUE(use_fp8(*module, options));
  module->lint();
  const Attr& state = module->state().get("up.weight_fp8_state");
  EXPECT_EQ(state.kind, AttrKind::Buffer);
  EXPECT_EQ(state.tensor.sizes(), at::IntArrayRef({3, 6}));
  EXPECT_TRUE(module->named_buffers().contains("up.weight_fp8_state"));
  const at::Tensor x = randn_there({4, 16});
  const at::Tensor y = module->run({x})[0].toTensor();
  // Both layers have entered their inputs and the weight, none a gradient yet.
  EXPECT_EQ(state.tensor[0][2].item<float>(), x.abs().max().item<float>());
  EXPECT_EQ(state.tensor[1][1].item<float>(), state.tensor[1][2].item<float>());
  EXPECT_EQ(state.tensor[2].slice(0, 1).abs().max().item<float>(), 0);
  y.sum().backward();
  EXPECT_EQ(state.tensor[2][2].item<float>(), 1);
  module->run({x * 100});
  EXPECT_EQ(state.tensor[0][2].item<float>(), (x * 100).abs().max().item<float>());

  auto fixed = module_of(text, random_weights({{"up.weight", {16, 16}}}));
  fixed->set_made_in_training(false);
  use_fp8(*fixed, options);
  fixed->run({x});
  EXPECT_TRUE(at::equal(fixed->state().get("up.weight_fp8_state").tensor, delayed_state(5, at::kCPU)));
  options.history = 0;
  EXPECT_THROW(use_fp8(*module, options), Error);
}

}  // namespace
}  // namespace plumb
