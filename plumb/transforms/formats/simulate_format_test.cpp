#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/autograd/recompute/recompute_testing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/autograd/recompute/live_bytes.h"
#include "plumb/autograd/simulate_format.h"
#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/numerics/quantise.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using namespace testing_models;

SimulateFormatOptions nearest() {
  SimulateFormatOptions options;
  options.fwd = "e4m3fn-RN", options.bwd = "e5m2-RN";
  return options;
}

std::string after(const std::string& text, State state = {}, const SimulateFormatOptions& options = nearest(),
                  Report* report = nullptr) {
  auto module = module_of(text, std::move(state));
  simulate_format(*module, options, report);
  module->lint();
  return to_string(module->graph());
}

State weights(std::initializer_list<std::pair<const char*, std::vector<int64_t>>> parameters) {
  State state;
  for (const auto& [name, sizes] : parameters) parameter(state, name, randn_there(sizes));
  return state;
}

TEST(SimulateFormat, RoundsInputsAndWeightsForwardAndTheOutputsGradient) {
  EXPECT_EQ(after(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b"
      %y: f32[4, 3] = aten::linear(%x, %w, %b) %z = aten::relu(%y) output(%z) })",
                  weights({{"w", {3, 8}}, {"b", {3}}})),
            to_string(parse_graph(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %w = get_attr "w"
      %b = get_attr "b"
      %x_fwd: f32[4, 8] = plumb::simulate_format(%x, "e4m3fn-RN", "none")
      %w_fwd = plumb::simulate_format(%w, "e4m3fn-RN", "none")
      %y: f32[4, 3] = aten::linear(%x_fwd, %w_fwd, %b)
      %y_bwd: f32[4, 3] = plumb::simulate_format(%y, "none", "e5m2-RN")
      %z = aten::relu(%y_bwd)
      output(%z)
    })")));
}

TEST(SimulateFormat, LeavesNoProductUnroundedInSilence) {
  for (const char* product :
       {"aten::tensordot(%x, %w, [1], [0])", "aten::linalg_vecdot(%x, %w)", "aten::matmul(%x, %w)"}) {
    const std::string text = after(
        std::string(R"(graph { %x: f32[8, 8] = placeholder "x" %w = get_attr "w" %y = )") + product + " output(%y) }",
        weights({{"w", {8, 8}}}));
    EXPECT_THAT(text, HasSubstr("(%x_fwd, %w_fwd")) << product;
    EXPECT_THAT(text, HasSubstr(R"(plumb::simulate_format(%y, "none", "e5m2-RN"))")) << product;
  }
  for (const char* hidden : {"aten::linalg_multi_dot([%x, %w, %w])", "aten::chain_matmul([%x, %w, %w])",
                             "aten::linalg_matrix_power(%w, 3)", "aten::matrix_power(%w, 3)"}) {
    Report report;
    after(std::string(R"(graph { %x: f32[8, 8] = placeholder "x" %w = get_attr "w" %y = )") + hidden + " output(%y) }",
          weights({{"w", {8, 8}}}), nearest(), &report);
    const ReportEntry* entry = report.find(ReportKind::LeftAlone, "y");
    ASSERT_TRUE(entry) << hidden;
    EXPECT_THAT(entry->reason, HasSubstr("a @ b @ c")) << hidden;
  }
}

TEST(SimulateFormat, RoundsProductsThatAreWrittenInPlaceWhereNobodySeesIt) {
  const std::string sum = " %y: f32[8, 8] = aten::addmm_(%h, %x, %w) output(%y) }";
  EXPECT_THAT(after(R"(graph { %x: f32[8, 8] = placeholder "x" %w: f32[8, 8] = get_attr "w"
      %h: f32[8, 8] = aten::tanh(%x))" +
                        sum,
                    weights({{"w", {8, 8}}})),
              HasSubstr("aten::addmm(%h, %x_fwd, %w_fwd)"));
  Report report;
  after(R"(graph { %x: f32[8, 8] = placeholder "x" %h: f32[8, 8] = placeholder "h" %w: f32[8, 8] = get_attr "w")" + sum,
        weights({{"w", {8, 8}}}), nearest(), &report);
  ASSERT_TRUE(report.find(ReportKind::LeftAlone, "y"));
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "y")->reason, HasSubstr("something else sees the memory"));
}

TEST(SimulateFormat, ARunKeepsAQuarterOfWhatProductsSave) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  State state;
  const at::Tensor x = randn_there({128, 256}).requires_grad_(), w = randn_there({256, 256}).requires_grad_();
  state.add({"w", AttrKind::Parameter, w});
  auto module = module_of(R"(graph { %x: f32[128, 256] = placeholder "x" %w = get_attr "w"
      %y: f32[128, 256] = aten::linear(%x, %w) output(%y) })",
                          std::move(state));
  simulate_format(*module, nearest());
  module->run({x});
  const LiveBytes meter;
  const at::Tensor y = module->run({x})[0].toTensor();
  EXPECT_LE(double(meter.live()) - double(y.nbytes()), 0.3 * double(x.nbytes() + w.nbytes()));
}

TEST(SimulateFormat, GivesTheValuesAndGradientsOfQuantisedOperands) {
  at::manual_seed(2);
  auto module = module_of(R"(graph { %x: f32[16, 8] = placeholder "x" %w = get_attr "w" %b = get_attr "b"
      %y = aten::linear(%x, %w, %b) %q = aten::mul.Tensor(%y, %y) output(%q) })",
                          weights({{"w", {3, 8}}, {"b", {3}}}));
  auto simulated = simulate_format(module, nearest());
  at::Tensor x = randn_there({16, 8}).requires_grad_();
  const at::Tensor out = simulated->run({x})[0].toTensor();
  const at::Tensor seed = at::randn_like(out);
  out.backward(seed);
  const at::Tensor w = module->state().get("w").tensor, b = module->state().get("b").tensor;
  const FPFormat fwd = FPFormat::parse("e4m3fn"), bwd = FPFormat::parse("e5m2");
  at::NoGradGuard no_grad;
  const at::Tensor xq = quantise(x, fwd), wq = quantise(w, fwd), y = at::linear(xq, wq, b);
  const at::Tensor g = quantise(seed * y + seed * y, bwd);
  EXPECT_TRUE(at::equal(out, y * y));
  EXPECT_TRUE(at::equal(x.grad(), g.mm(wq)));
  EXPECT_TRUE(at::equal(w.grad(), g.t().mm(xq)));
  EXPECT_TRUE(at::equal(b.grad(), g.sum(0)));
  EXPECT_FALSE(at::equal(xq, x));
  EXPECT_TRUE(w.is_same(simulated->state().get("w").tensor)) << "the parameters are shared";
}

TEST(SimulateFormat, RoundsAValueOnceForSeveralProducts) {
  const std::string text = after(R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "w" %v = get_attr "v"
      %a = aten::linear(%x, %w) %b = aten::linear(%x, %v) %c = aten::linear(%a, %w) output(%b, %c) })",
                                 weights({{"w", {8, 8}}, {"v", {8, 8}}}));
  size_t count = 0;
  for (size_t at = 0; (at = text.find("\"none\")", at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, 4u) << "x, w, v, a\n" << text;
}

TEST(SimulateFormat, RoundsAgainAfterAWrite) {
  const std::string text =
      after(R"(graph { %x: f32[8, 8] = placeholder "x" %a = aten::mm(%x, %x) %y = aten::mul_.Tensor(%x, 2)
      %b = aten::mm(%x, %x) output(%a, %b) })");
  EXPECT_THAT(text, HasSubstr("%a = aten::mm(%x_fwd, %x_fwd)"));
  EXPECT_THAT(text, HasSubstr("%b = aten::mm(%x_fwd_1, %x_fwd_1)"));
}

TEST(SimulateFormat, TreatsEveryProductOfBothFamilies) {
  const std::string text = after(R"(graph {
      %x: f32[1, 2, 4, 4] = placeholder "x"
      %k = get_attr "k"
      %c = aten::conv2d(%x, %k, None, 1, 1)
      %a = aten::scaled_dot_product_attention(%c, %c, %c)
      %b = aten::matmul(%a, %c)
      %d = plumb::matmul(%b, %a)
      %e = plumb::scaled_dot_product_attention(%d, %b, %a)
      %f = aten::einsum("bhij,bhjk->bhik", [%e, %d])
      output(%f)
    })",
                                 weights({{"k", {2, 2, 3, 3}}}));
  for (const char* call : {"%c = aten::conv2d(%x_fwd, %k_fwd,",
                           "%a = aten::scaled_dot_product_attention(%c_bwd_fwd, %c_bwd_fwd, %c_bwd_fwd)",
                           "%b = aten::matmul(%a_bwd_fwd, %c_bwd_fwd)", "%d = plumb::matmul(%b_bwd_fwd, %a_bwd_fwd)",
                           "%e = plumb::scaled_dot_product_attention(%d_bwd_fwd, %b_bwd_fwd, %a_bwd_fwd)",
                           "%f = aten::einsum(\"bhij,bhjk->bhik\", [%e_bwd_fwd, %d_bwd_fwd])", "output(%f_bwd)"}) {
    EXPECT_THAT(text, HasSubstr(call));
  }
}

TEST(SimulateFormat, LeavesOtherOperatorsAlone) {
  const std::string text = R"(graph { %x: f32[4, 8] = placeholder "x" %i: i64[4] = placeholder "i" %w = get_attr "w"
      %e = aten::embedding(%w, %i) %n = aten::layer_norm(%x, [8]) %g = aten::gelu(%n) %y = aten::add.Tensor(%g, %e) output(%y) })";
  EXPECT_EQ(after(text, weights({{"w", {10, 8}}})), to_string(parse_graph(text)));
}

TEST(SimulateFormat, LeavesProductsThatMakeTablesAlone) {
  Report report;
  State state;
  parameter(state, "w", randn_there({8, 8}));
  state.add({"frequencies", AttrKind::Buffer, ones_there({8})});
  const std::string text =
      after(R"(graph { %x: f32[8, 8] = placeholder "x" %w = get_attr "w" %f = get_attr "frequencies"
      %places = aten::arange(8.0) %angles = aten::einsum("i, j -> i j", [%places, %f]) %t = aten::cos(%angles)
      %y = aten::mm(%x, %w) %d = aten::detach(%y) %z = aten::mm(%d, %t) output(%z) })",
            std::move(state), nearest(), &report);
  EXPECT_THAT(text, HasSubstr("einsum(\"i, j -> i j\", [%places, %f])"));
  EXPECT_THAT(text, HasSubstr("aten::mm(%d_fwd, %t_fwd)")) << "what an input flows into is rounded, detached or not";
  ASSERT_NE(report.find(ReportKind::LeftAlone, "angles"), nullptr);
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "angles")->reason, HasSubstr("it makes a table"));
}

TEST(SimulateFormat, HonorsExclusionsAndChosenOperators) {
  const char* text = R"(graph { %x: f32[4, 8] = placeholder "x" %w = get_attr "head.weight" %v = get_attr "body.weight"
      %a = aten::linear(%x, %v) in "":"Net" "body":"Linear" %m = aten::matmul(%a, %a) %b = aten::linear(%m, %w) output(%b) })";
  SimulateFormatOptions options = nearest();
  options.exclude = {"head.*"};
  Report report;
  std::string result = after(text, weights({{"head.weight", {8, 8}}, {"body.weight", {8, 8}}}), options, &report);
  EXPECT_THAT(result, HasSubstr("aten::linear(%m_bwd, %w)"));
  EXPECT_THAT(result, HasSubstr("aten::linear(%x_fwd, %v_fwd)"));
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "b")->reason, "excluded by 'head.*'");
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "head.*"), nullptr);
  options = nearest();
  options.exclude = {"body"};
  options.operators = {"linear"};
  result = after(text, weights({{"head.weight", {8, 8}}, {"body.weight", {8, 8}}}), options);
  EXPECT_THAT(result, HasSubstr("%a = aten::linear(%x, %v)"));
  EXPECT_THAT(result, HasSubstr("%m = aten::matmul(%a, %a)"));
  EXPECT_THAT(result, HasSubstr("%b = aten::linear(%m_fwd, %w_fwd)"));
}

TEST(SimulateFormat, ANameOfAModuleStandsForNoValueOfThatName) {
  const char* text = R"(graph { %x: f32[4, 8] = placeholder "x" %v = get_attr "a.weight" %w = get_attr "linear.weight"
      %linear = aten::linear(%x, %v) in "":"Net" "a":"Linear"
      %linear_1 = aten::linear(%linear, %w) in "":"Net" "linear":"Linear" output(%linear_1) })";
  const auto excluding = [&](const char* pattern) {
    SimulateFormatOptions options = nearest();
    options.exclude = {pattern};
    return after(text, weights({{"a.weight", {8, 8}}, {"linear.weight", {8, 8}}}), options);
  };
  const auto first = HasSubstr("%linear = aten::linear(%x_fwd, %v_fwd)"),
             second = HasSubstr("%linear_1 = aten::linear(%linear_bwd_fwd, %w_fwd)");
  EXPECT_THAT(excluding("linear"), AllOf(first, Not(second)));
  EXPECT_THAT(excluding("%linear"), AllOf(Not(first), HasSubstr("aten::linear(%linear_fwd, %w_fwd)")));
  EXPECT_THAT(excluding("linear_?"), AllOf(first, Not(second))) << "no module has that name";
}

TEST(SimulateFormat, BlocksRunAlongTheDimensionsThatAnEinsumSumsOver) {
  SimulateFormatOptions blocks;
  blocks.fwd = "mxfp8-RN", blocks.bwd = "mxfp4-RN";
  struct Case {
    const char *call, *x, *w, *y;
  };
  for (const auto& [call, x, w, y] : {Case{R"(aten::einsum("bij,bjk->bik", [%x, %w]))", "", ", dim=-2", ""},
                                      Case{R"(aten::einsum("bij,bjk->bki", [%x, %w]))", "", ", dim=-2", ", dim=-2"},
                                      Case{R"(aten::einsum("...ij,kji", [%x, %w]))", "", ", dim=-2", ""},
                                      Case{R"(aten::einsum("b i j, k i j -> k b", [%x, %w]))", "", "", ", dim=-2"},
                                      Case{"aten::tensordot(%x, %w, [0, 1], [0, 2])", ", dim=1", ", dim=2", ""}}) {
    const std::string text =
        after(std::string(R"(graph { %x: f32[4, 4, 4] = placeholder "x" %w = get_attr "w" %y: f32[4, 4] = )") + call +
                  " output(%y) }",
              weights({{"w", {4, 4, 4}}}), blocks);
    const auto rounding = [](const std::string& formats, const char* dim) {
      return HasSubstr("plumb::simulate_format(" + formats + dim + ")");
    };
    EXPECT_THAT(text, rounding(R"(%x, "mxfp8e4m3-RN", "none")", x)) << call;
    EXPECT_THAT(text, rounding(R"(%w, "mxfp8e4m3-RN", "none")", w)) << call;
    EXPECT_THAT(text, rounding(R"(%y, "none", "mxfp4-RN")", y)) << call;
  }
}

TEST(SimulateFormat, TakesAnEquationThatIsAnInput) {
  EXPECT_THAT(after(R"(graph { %x: f32[8, 8] = placeholder "x" %e = placeholder "e" %w = get_attr "w"
      %y: f32[8, 8] = aten::einsum(%e, [%x, %w, %w]) output(%y) })",
                    weights({{"w", {8, 8}}}), nearest()),
              HasSubstr("[%x_fwd, %w_fwd, %w_fwd]"));
}

TEST(SimulateFormat, LeavesEinsumsAloneThatMultiplyNoMatrices) {
  for (const char* call : {R"(aten::einsum("ij->ji", [%x]))", R"(aten::einsum("ii->i", [%x]))",
                           R"(aten::einsum("ij,ij->ij", [%x, %w]))", R"(aten::einsum("ij,kl->ijkl", [%x, %w]))",
                           R"(aten::einsum("ij,kl->ik", [%x, %w]))", "aten::tensordot(%x, %w, [], [])"}) {
    Report report;
    const std::string text = after(
        std::string(R"(graph { %x: f32[8, 8] = placeholder "x" %w = get_attr "w" %y = )") + call + " output(%y) }",
        weights({{"w", {8, 8}}}), nearest(), &report);
    EXPECT_THAT(text, Not(HasSubstr("simulate_format"))) << call;
    ASSERT_TRUE(report.find(ReportKind::LeftAlone, "y")) << call;
    EXPECT_THAT(report.find(ReportKind::LeftAlone, "y")->reason, HasSubstr("no dimension that two operands share"));
  }
}

TEST(SimulateFormat, TakesRecurrentOperatorsApartAndRoundsTheirLinearLayers) {
  const char* text =
      R"(graph { %x: f32[5, 2, 4] = placeholder "x" %h: f32[1, 2, 6] = placeholder "h" %a = get_attr "a" %b = get_attr "b"
      %y, %hn, %cn = aten::lstm.input(%x, [%h, %h], [%a, %b], False, 1, 0.0, False, False, False) output(%y, %cn) })";
  const State state = weights({{"a", {24, 4}}, {"b", {24, 6}}});
  auto module = module_of(text, state);
  auto low = simulate_format(module, nearest());
  const Report& report = low->reports.back();
  EXPECT_EQ(report.find(ReportKind::Replaced, "y")->reason, "taken apart into steps: 6 linear layers");
  EXPECT_EQ(report.count(ReportKind::Quantised), 6u);

  at::manual_seed(5);
  const at::Tensor x = randn_there({5, 2, 4}).requires_grad_(), h0 = randn_there({1, 2, 6});
  const at::Tensor w = state.get("a").tensor, u = state.get("b").tensor;
  auto linear = [](const at::Tensor& input, const at::Tensor& weight) {
    const at::Tensor y =
        at::linear(ops::simulate_format(input, "e4m3fn-RN", "none"), ops::simulate_format(weight, "e4m3fn-RN", "none"));
    return ops::simulate_format(y, "none", "e5m2-RN");
  };
  at::Tensor h = h0[0], c = h0[0];
  std::vector<at::Tensor> all;
  for (int64_t t = 0; t < 5; ++t) {
    const auto gates = (linear(h, u) + linear(x[t], w)).chunk(4, 1);
    c = at::sigmoid(gates[1]) * c + at::sigmoid(gates[0]) * at::tanh(gates[2]);
    h = at::sigmoid(gates[3]) * at::tanh(c);
    all.push_back(h);
  }
  const auto got = low->run({x, h0});
  EXPECT_TRUE(at::allclose(got[0].toTensor(), at::stack(all)));
  EXPECT_TRUE(at::allclose(got[1].toTensor()[0], c));
  const at::Tensor seed = randn_there({5, 2, 6});
  const std::vector<at::Tensor> wanted = {x, w, u};
  const auto mine = torch::autograd::grad({got[0].toTensor()}, wanted, {seed});
  const auto expected = torch::autograd::grad({at::stack(all)}, wanted, {seed});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(mine[i], expected[i], 1e-4, 1e-6)) << i;
}

TEST(SimulateFormat, LeavesRecurrentOperatorsAloneWhereItCannotOrMustNot) {
  const char* text =
      R"(graph { %x: f32[5, 2, 4] = placeholder "x" %h: f32[1, 2, 6] = placeholder "h" %a = get_attr "a" %b = get_attr "b"
      %y, %hn = aten::gru.input(%x, %h, [%a, %b], False, 1, 0.0, False, False, False) output(%y) })";
  const State state = weights({{"a", {18, 4}}, {"b", {18, 6}}});
  Report report;
  SimulateFormatOptions options = nearest();
  options.operators = {"linear"};
  EXPECT_THAT(after(text, state, options, &report), HasSubstr("aten::gru.input"));
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "y")->reason, "not among the operators asked for");
  options.operators = {"gru"};
  EXPECT_THAT(after(text, state, options), HasSubstr("%a_fwd"));
  const char* unknown =
      R"(graph { %x = placeholder "x" %h: f32[1, 2, 6] = placeholder "h" %a = get_attr "a" %b = get_attr "b"
      %y, %hn = aten::gru.input(%x, %h, [%a, %b], False, 1, 0.0, False, False, False) output(%y) })";
  Report second;
  EXPECT_THAT(after(unknown, state, nearest(), &second), HasSubstr("aten::gru.input"));
  EXPECT_EQ(second.find(ReportKind::LeftAlone, "y")->reason, "its number of steps is not known");
}

TEST(SimulateFormat, RoundsAUnitScaledRecurrentWeightAndNotWhatItIsMultipliedTo) {
  const char* text =
      R"(graph { %x: f32[2, 4] = placeholder "x" %h: f32[2, 6] = placeholder "h" %a = get_attr "a" %b = get_attr "b"
      %y = aten::rnn_tanh_cell(%x, %h, %a, %b, None, None) output(%y) })";
  auto low = simulate_format(unit_scale(module_of(text, weights({{"a", {6, 4}}, {"b", {6, 6}}}))), nearest());
  for (const Node* node : low->graph().nodes()) {
    if (!node->is_op("aten::linear")) continue;
    const Node* factor = node->input(1)->producer();
    EXPECT_TRUE(factor->is_op("plumb::scale_fwd")) << to_string(low->graph());
    const Node* inner = factor->input(0)->producer();
    EXPECT_TRUE(inner->is_op("plumb::scale_bwd"));
    EXPECT_TRUE(inner->input(0)->producer()->is_op("plumb::simulate_format"));
  }
}

TEST(SimulateFormat, RefusesFormatsAndOperatorsThatDoNotExist) {
  auto module = gpt();
  SimulateFormatOptions options;
  options.fwd = "E9M9";
  EXPECT_THROW(simulate_format(module, options), Error);
  options = {};
  options.operators = {"aten::relu"};
  EXPECT_THROW(simulate_format(module, options), Error);
}

TEST(SimulateFormat, HonorsRoundingAndRandomBits) {
  SimulateFormatOptions options;
  options.rounding = Rounding::Nearest;
  EXPECT_THAT(to_string(simulate_fp8(gpt(), options)->graph()), HasSubstr("\"E4M3-RN\", \"none\""));
  options.rounding = Rounding::Stochastic;
  options.srbits = 8;
  const std::string text = to_string(simulate_fp8(gpt(), options)->graph());
  EXPECT_THAT(text, HasSubstr("\"E4M3-SR8\", \"none\""));
  EXPECT_THAT(text, HasSubstr("\"none\", \"E5M2-SR8\""));
  EXPECT_THAT(to_string(simulate_fp8(gpt())->graph()), HasSubstr("\"E4M3-SR\""));
}

TEST(SimulateFormat, RefusesRandomBitsOfARoundingThatHasNone) {
  SimulateFormatOptions options;
  options.rounding = Rounding::Nearest;
  options.srbits = 8;
  EXPECT_THROW(simulate_fp8(gpt(), options), Error);
  options.rounding = {};
  EXPECT_THAT(to_string(simulate_fp8(gpt(), options)->graph()), HasSubstr("\"E4M3-SR8\", \"none\""));
  options.fwd = "E4M3-RN";
  auto module = gpt();
  EXPECT_THROW(simulate_format(*module, options), Error);
}

TEST(SimulateFormat, ChangesNothingWhereBothDirectionsAreNone) {
  auto module = gpt();
  SimulateFormatOptions options;
  options.fwd = options.bwd = "none";
  const std::string before = to_string(module->graph());
  EXPECT_FALSE(simulate_format(*module, options));
  EXPECT_EQ(to_string(module->graph()), before);
}

TEST(SimulateFormat, LeavesTheModuleItWasGivenAsItWas) {
  auto module = gpt();
  const std::string before = to_string(module->graph());
  simulate_fp8(module);
  EXPECT_EQ(to_string(module->graph()), before);
}

TEST(SimulateFormat, TrainsAUnitScaledTransformerWithinReachOfFullPrecision) {
  at::manual_seed(3);
  auto scaled = unit_scale(gpt());
  auto simulated = simulate_format(scaled, nearest());
  const auto inputs = gpt_inputs();
  const double full = scaled->run(inputs)[0].toTensor().item<double>();
  const at::Tensor loss = simulated->run(inputs)[0].toTensor();
  loss.backward();
  EXPECT_NE(loss.item<double>(), full);
  EXPECT_NEAR(loss.item<double>(), full, 0.05 * full);
  for (const auto& p : simulated->named_parameters()) {
    EXPECT_TRUE(p.value().grad().defined() && p.value().grad().isfinite().all().item<bool>()) << p.key();
  }
}

TEST(SimulateFormat, RunsFromTheTableOfPasses) {
  auto module = gpt();
  EXPECT_TRUE(
      run_pass(find_pass("simulate_format"), *module, {{"fwd", "e4m3fn"}, {"exclude", "blocks.0.*"}}, nullptr, true));
  EXPECT_THROW(run_pass(find_pass("simulate_format"), *module, {{"srbits", "many"}}), Error);
}

}  // namespace
}  // namespace plumb
