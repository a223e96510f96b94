#include "plumb/transforms/optimise/optimise.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/optimise/optimise_testing.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using namespace testing_models;
using namespace testing_optimise;

TEST(Optimise, RunsAChainOfPointwiseOperatorsAsOne) {
  auto module = module_of(R"(graph {
    %x: f32[300, 50] = placeholder "x"
    %y: f32[300, 50] = placeholder "y"
    %a: f32[300, 50] = aten::mul.Tensor(%x, 0.5)
    %b: f32[300, 50] = aten::sigmoid(%a)
    %c: f32[300, 50] = aten::mul.Tensor(%b, %y)
    %d: f32[300, 50] = aten::gelu(%c)
    output(%d)
  })");
  auto fast = compile(module, {.min_elements = 0});
  EXPECT_EQ(to_string(fast->graph()), R"(graph {
  %x: f32[300, 50] = placeholder "x"
  %y: f32[300, 50] = placeholder "y"
  %d: f32[300, 50] = plumb::pointwise([%x, %y], "mul #0 0.5; sigmoid! $0; mul $1 #1; gelu $2")
  output(%d)
}
)");
  expect_same_bits(*module, *fast, {randn_there({300, 50}), randn_there({300, 50})});
  EXPECT_NE(fast->reports.back().to_text().find("4 steps in one pass"), std::string::npos);
}

TEST(Optimise, KeepsTheBitsOfUnitScaledChains) {
  auto module = module_of(R"(graph {
    %x: f32[300, 50] = placeholder "x"
    %y: f32[300, 50] = placeholder "y"
    %g: f32[300, 50] = plumb::gelu(%x)
    %s: f32[300, 50] = plumb::silu_glu(%g, %y)
    %f: f32[300, 50] = plumb::scale_fwd(%s, 0.3)
    %b: f32[300, 50] = plumb::scale_bwd(%f, 0.7)
    %t: f32[300, 50] = plumb::silu(%b, constraint=None)
    %r: f32[300, 50] = plumb::residual_add(%t, %y, 0.5)
    output(%r)
  })");
  auto fast = compile(module, {.exact = true, .min_elements = 0});
  EXPECT_EQ(count(*fast, "plumb::pointwise"), 1u) << to_string(fast->graph());
  EXPECT_EQ(fast->graph().size(), 4u);
  auto folded = compile(module, {.min_elements = 0});
  EXPECT_EQ(folded->graph().size(), 4u);
  expect_close(*module, *folded, {randn_there({300, 50}), randn_there({300, 50})});
  expect_same_bits(*module, *fast, {randn_there({300, 50}), randn_there({300, 50})});
}

TEST(Optimise, KeepsTheBitsInEveryFloatingType) {
  for (const char* type : {"f32", "f64", "f16", "bf16"}) {
    std::string text = R"(graph {
      %x: T[90, 50] = placeholder "x"
      %y: T[90, 50] = placeholder "y"
      %a: T[90, 50] = aten::tanh(%x)
      %b: T[90, 50] = aten::gelu(%a)
      %c: T[90, 50] = aten::sub.Tensor(%b, %y)
      %d: T[90, 50] = plumb::scale_fwd(%c, 1.7)
      output(%d)
    })";
    for (size_t at; (at = text.find("T[")) != std::string::npos;) text.replace(at, 1, type);
    auto module = module_of(text);
    auto fast = compile(module, {.min_elements = 0});
    EXPECT_EQ(count(*fast, "plumb::pointwise"), 1u);
    const auto dtype = module->graph().find_value("x")->meta()->dtype;
    expect_same_bits(*module, *fast, {randn_there({90, 50}).to(dtype), randn_there({90, 50}).to(dtype)});
  }
}

TEST(Optimise, LeavesValuesAloneThatOthersSee) {
  auto module = module_of(R"(graph {
    %x: f32[30] = placeholder "x"
    %a: f32[30] = aten::mul.Tensor(%x, 3.0)
    %b: f32[30] = aten::neg(%a)
    output(%a, %b)
  })");
  auto same = derive(*module);
  Report report("optimise");
  EXPECT_FALSE(optimise(*same, {}, &report));
  EXPECT_EQ(to_string(same->graph()), to_string(module->graph()));
  ASSERT_EQ(report.count(ReportKind::LeftAlone), 1u);
  EXPECT_NE(report.entries()[0].reason.find("used elsewhere"), std::string::npos);
}

TEST(Optimise, LeavesBroadcastsMixedTypesAndUnknownTypesAlone) {
  for (const char* text : {R"(graph {
    %x: f32[30, 4] = placeholder "x"  %y: f32[4] = placeholder "y"
    %a: f32[30, 4] = aten::mul.Tensor(%x, %y)  %b: f32[30, 4] = aten::add.Tensor(%a, %y)
    output(%b) })",
                           R"(graph {
    %x: f32[4] = placeholder "x"  %y: f64[4] = placeholder "y"
    %a: f64[4] = aten::mul.Tensor(%x, %y)  %b: f64[4] = aten::add.Tensor(%x, %a)
    output(%b) })",
                           R"(graph {
    %x = placeholder "x"  %a = aten::mul.Tensor(%x, 2.0)  %b = aten::neg(%a)
    output(%b) })",
                           R"(graph {
    %x: f32[4] = placeholder "x"  %a: f32[4] = aten::add.Tensor(%x, %x, alpha=2)  %b: f32[4] = aten::neg(%a)
    output(%b) })",
                           R"(graph {
    %x: i64[4] = placeholder "x"  %a: i64[4] = aten::mul.Tensor(%x, 2)  %b: i64[4] = aten::neg(%a)
    output(%b) })"}) {
    auto module = module_of(text);
    EXPECT_FALSE(optimise(*derive(*module))) << text;
  }
}

TEST(Optimise, DoesNotMoveReadsOverWrites) {
  auto module = module_of(R"(graph {
    %x: f32[30] = placeholder "x"
    %c: f32[30] = aten::clone(%x)
    %a: f32[30] = aten::mul.Tensor(%c, 3.0)
    %w: f32[30] = aten::add_.Tensor(%c, 1.0)
    %b: f32[30] = aten::neg(%a)
    %d: f32[30] = aten::exp(%b)
    output(%d, %w)
  })");
  auto fast = compile(module, {.min_elements = 0});
  EXPECT_EQ(count(*fast, "aten::mul"), 1u);
  EXPECT_EQ(count(*fast, "plumb::pointwise"), 1u);
  expect_same_bits(*module, *fast, {randn_there({30})});
}

TEST(Optimise, AFactorOfOneStaysBehindAResultThatTheGradientNeeds) {
  auto module = module_of(R"(graph {
    %x: f32[30] = placeholder "x"
    %a: f32[30] = aten::tanh(%x)
    %b: f32[30] = aten::mul.Tensor(%a, 1)
    %c: f32[30] = aten::relu_(%b)
    output(%c)
  })");
  auto fast = compile(module, {.min_elements = 0});
  EXPECT_EQ(count(*fast, "plumb::pointwise"), 1u);
  expect_same_bits(*module, *fast, {randn_there({30})});
}

TEST(Optimise, CutsLongChainsAndStaysNearLinear) {
  std::string text = "graph {\n  %v0: f32[8] = placeholder \"x\"\n";
  for (int i = 0; i < 20000; ++i)
    text += "  %v" + std::to_string(i + 1) + ": f32[8] = aten::mul.Tensor(%v" + std::to_string(i) + ", 1.0001)\n";
  auto module = module_of(text + "  output(%v20000)\n}");
  EXPECT_EQ(compile(module)->graph().size(), 3u) << "one factor";
  auto fast = compile(module, {.exact = true});
  EXPECT_EQ(fast->graph().size(), 2u + 20000 / 32);
  const at::Tensor x = randn_there({8});
  EXPECT_TRUE(at::equal(run(*module, {x})[0], run(*fast, {x})[0]));
}

TEST(Optimise, RandomGraphsKeepTheirBits) {
  std::mt19937 random(5);
  size_t fused = 0;
  for (int round = 0; round < 200; ++round) {
    std::string text = "graph {\n  %v0: f32[6, 7] = placeholder \"a\"\n  %v1: f32[6, 7] = placeholder \"b\"\n";
    const int nodes = 3 + static_cast<int>(random() % 12);
    auto any = [&](int below) {
      return "%v" + std::to_string(static_cast<int>(random() % static_cast<unsigned>(below)));
    };
    std::string last;
    for (int i = 0; i < nodes; ++i) {
      static const char* kOps[] = {"aten::mul.Tensor(A, B)",
                                   "aten::add.Tensor(A, B)",
                                   "aten::sub.Tensor(A, B)",
                                   "aten::neg(A)",
                                   "aten::tanh(A)",
                                   "aten::sigmoid(A)",
                                   "aten::mul.Tensor(A, 1.7)",
                                   "aten::gelu(A)",
                                   "plumb::gelu(A)",
                                   "plumb::residual_add(A, B, 0.3)",
                                   "aten::cos(A)",
                                   "plumb::scale_bwd(A, 0.9)",
                                   "aten::relu(A)",
                                   "plumb::add(A, B)",
                                   "aten::silu(A)"};
      std::string op = kOps[random() % std::size(kOps)];
      if (auto at = op.find("A"); at != std::string::npos && op.find("(A") != std::string::npos)
        op.replace(op.find("(A") + 1, 1, random() % 2 ? "%v" + std::to_string(i + 1) : any(i + 2));
      if (auto at = op.find(" B"); at != std::string::npos) op.replace(at + 1, 1, any(i + 2));
      last = "%v" + std::to_string(i + 2);
      text += "  " + last + ": f32[6, 7] = " + op + "\n";
    }
    auto module = module_of(text + "  output(" + last + ")\n}");
    auto fast = compile(module, {.exact = true, .min_elements = 0});
    fast->lint();
    fused += count(*fast, "plumb::pointwise");
    const Tensors inputs = {randn_there({6, 7}), randn_there({6, 7})};
    const Tensors x = outputs_and_gradients(*module, inputs), y = outputs_and_gradients(*fast, inputs);
    EXPECT_TRUE(at::equal(x[0], y[0])) << text;
    // Inner operands of unknown grad: only the order of three sums may differ.
    for (size_t i = 1; i < x.size(); ++i) EXPECT_TRUE(at::allclose(x[i], y[i], 1e-5, 1e-6)) << text;
    EXPECT_FALSE(optimise(*derive(*fast), {.fold = false, .min_elements = 0})) << to_string(fast->graph());
    auto folded = compile(module, {.min_elements = 0});
    const Tensors z = outputs_and_gradients(*folded, inputs);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_TRUE(at::allclose(x[i], z[i], 1e-4, 1e-5)) << text << to_string(folded->graph());
  }
  EXPECT_GT(fused, 100u);
}

TEST(Optimise, WorksOnAWholeModelAfterTheTransforms) {
  at::manual_seed(3);
  auto model = gpt();
  const Tensors inputs = {there(at::randint(96, {8, 32})), there(at::randint(96, {8, 32}))};
  SimulateFormatOptions nearest;
  nearest.fwd = "E4M3-RN";
  nearest.bwd = "E5M2-RN";
  auto scaled = unit_scale(model);
  for (auto module : {std::shared_ptr<GraphModule>(model), std::shared_ptr<GraphModule>(scaled),
                      std::shared_ptr<GraphModule>(simulate_format(scaled, nearest)),
                      std::shared_ptr<GraphModule>(track_scales(scaled))}) {
    auto fast = compile(module, {.exact = true, .min_elements = 0});
    fast->lint();
    const Tensors x = outputs_and_gradients(*module, inputs), y = outputs_and_gradients(*fast, inputs);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(at::allclose(x[i], y[i], 1e-4, 1e-5)) << i;
    EXPECT_TRUE(at::equal(x[0], y[0]));
  }
}

TEST(Optimise, LeavesAloneWhatHasNothingToGain) {
  for (const char* text : {R"(graph {
    %x: f32[30] = placeholder "x"  %a: f32[30] = aten::tanh(%x)  %b: f32[30] = aten::neg(%a)
    output(%b) })",
                           R"(graph {
    %x: f32[300, 50]{1, 300} = placeholder "x"
    %a: f32[300, 50]{1, 300} = aten::tanh(%x)  %b: f32[300, 50]{1, 300} = aten::neg(%a)
    output(%b) })",
                           R"(graph {
    %x: f32[300, 50] = placeholder "x"  %y: f32[300, 50] = placeholder "y"
    %a: f32[300, 50] = plumb::residual_add(%x, %y, 0.5)
    output(%a) })",
                           R"(graph {
    %x: f32[300, 50] = placeholder "x"  %a: f32[300, 50] = aten::gelu(%x)
    output(%a) })"}) {
    auto module = module_of(text);
    EXPECT_FALSE(optimise(*derive(*module))) << text;
  }
}

TEST(Optimise, TakesChainsOnlyWhereTheySaveMoreThanTheyCost) {
  auto chain = [](const std::string& size, const std::vector<std::string>& ops) {
    std::string text = "graph {\n  %v0: f32[" + size + "] = placeholder \"x\"\n";
    for (size_t i = 0; i < ops.size(); ++i)
      text += "  %v" + std::to_string(i + 1) + ": f32[" + size + "] = aten::" + ops[i] + "(%v" + std::to_string(i) +
              (ops[i].ends_with(".Tensor") ? ", 1.5" : "") + ")\n";
    auto module = module_of(text + "  output(%v" + std::to_string(ops.size()) + ")\n}");
    return count(*compile(module, {.fold = false}), "plumb::pointwise");
  };
  const std::string add = "add.Tensor", mul = "mul.Tensor";
  EXPECT_EQ(chain("300000", {mul, add}), 1u);
  EXPECT_EQ(chain("300000", {"sigmoid", mul}), 1u);
  EXPECT_EQ(chain("300000", {"tanh", "tanh"}), 0u) << "functions take their time in any case";
  EXPECT_EQ(chain("300000", {"relu", add}), 0u) << "relu would be computed again";
  EXPECT_EQ(chain("3000", {mul, add, mul, add}), 0u) << "in cache";
  EXPECT_EQ(chain("3000", {mul, add, mul, add, "neg", mul}), 1u) << "six calls less";
  EXPECT_EQ(chain("3000", {"tanh", add, "tanh", add, "tanh", add}), 0u);
}

void expect_same_numbers(const std::optional<Metrics>& a, const std::optional<Metrics>& b, const std::string& what) {
  ASSERT_EQ(a.has_value(), b.has_value()) << what;
  if (!a) return;
  auto same = [&](const Metrics::Data& x, const Metrics::Data& y) {
    for (auto field : {&Metrics::Data::mean_abs, &Metrics::Data::abs_mean, &Metrics::Data::std, &Metrics::Data::abs_max,
                       &Metrics::Data::abs_min})
      EXPECT_TRUE(x.*field == y.*field || (std::isnan(x.*field) && std::isnan(y.*field)))  // one value has no std
          << what << ": " << x.*field << " and " << y.*field;
    EXPECT_EQ(x.zero_count, y.zero_count) << what;
    ASSERT_EQ(bool(x.histogram), bool(y.histogram)) << what;
    if (x.histogram) {
      EXPECT_EQ(x.histogram->counts, y.histogram->counts) << what;
    }
  };
  same(a->fwd, b->fwd);
  ASSERT_EQ(a->bwd.has_value(), b->bwd.has_value()) << what;
  if (a->bwd) same(*a->bwd, *b->bwd);
}

TEST(Optimise, MeasuresWhileItRounds) {
  at::manual_seed(3);
  const Tensors inputs = {there(at::randint(96, {8, 32})), there(at::randint(96, {8, 32}))};
  SimulateFormatOptions nearest;
  nearest.fwd = "E4M3-RN";
  nearest.bwd = "E5M2-RN";
  for (const bool histogram : {false, true}) {
    auto tracked = track_scales(simulate_format(unit_scale(gpt()), nearest), {.histogram = histogram});
    auto fast = compile(tracked, {.fold = false, .fuse = false});
    fast->lint();
    EXPECT_GT(count(*fast, "plumb::track_rounded"), 10u);
    EXPECT_EQ(count(*fast, "plumb::simulate_format"), 0u) << "a transformer has none that is not tracked";
    expect_same_bits(*tracked, *fast, inputs);
    const ScalesGraph a = scales_graph(*tracked), b = scales_graph(*fast);
    ASSERT_EQ(a.nodes.size(), b.nodes.size());
    for (size_t i = 0; i < a.nodes.size(); ++i) {
      EXPECT_EQ(a.nodes[i].name, b.nodes[i].name);
      EXPECT_EQ(a.nodes[i].target, b.nodes[i].target);
      expect_same_numbers(a.nodes[i].metrics, b.nodes[i].metrics, a.nodes[i].name);
    }
    fast->tracker->clear();
    fast->tracker->set_enabled(false);
    expect_same_bits(*tracked, *fast, inputs);
    EXPECT_FALSE(fast->tracker->metrics(0).has_value());
  }
}

TEST(Optimise, MeasuresSeveralRunsAsOneTensorWhileItRounds) {
  at::manual_seed(3);
  SimulateFormatOptions nearest;
  nearest.fwd = "E4M3-RN";
  nearest.bwd = "E5M2-RN";
  const auto rounded = simulate_format(unit_scale(gpt()), nearest);
  // Neighbors are wanted otherwise: one pass measures what is summed up beside what is not. Off the CPU only so: each
  // tensor takes dozens of operators there.
  for (const int64_t apart :
       there(at::empty({0})).is_cpu() ? std::vector<int64_t>{0, 1, 2, 3} : std::vector<int64_t>{3}) {
    auto tracked = track_scales(rounded), fast = compile(tracked, {.fold = false, .fuse = false});
    ASSERT_GT(count(*fast, "plumb::track_rounded"), 10u);
    for (const auto& tracker : {tracked->tracker, fast->tracker}) {
      for (int64_t slot = 0; slot < static_cast<int64_t>(tracker->num_slots()); ++slot) {
        const int64_t kind = apart == 3 ? slot % 3 : apart;
        tracker->want(slot,
                      {.histogram = slot % 2 == 0, .forward_together = kind != 1, .backward_together = kind != 2});
      }
    }
    std::vector<int64_t> once;
    for (int run = 0; run < 3; ++run) {
      expect_same_bits(*tracked, *fast, {there(at::randint(96, {8, 32})), there(at::randint(96, {8, 32}))});
      const ScalesGraph a = scales_graph(*tracked), b = scales_graph(*fast);
      ASSERT_EQ(a.nodes.size(), b.nodes.size());
      size_t rounded_tensors = 0, grown = 0;
      for (size_t i = 0; i < a.nodes.size(); ++i) {
        expect_same_numbers(a.nodes[i].metrics, b.nodes[i].metrics, a.nodes[i].name);
        if (!a.nodes[i].metrics || a.nodes[i].target != "plumb::simulate_format") continue;
        const int64_t numel = b.nodes[i].metrics->fwd.numel;
        EXPECT_EQ(a.nodes[i].metrics->fwd.numel, numel) << a.nodes[i].name;
        if (run == 0) once.push_back(numel);
        grown += numel == (run + 1) * once[rounded_tensors++] && run > 0;
      }
      EXPECT_GT(rounded_tensors, 10u);
      EXPECT_EQ(grown > 0, apart != 1 && run > 0) << "runs that are one tensor have all their elements";
    }
  }
}

TEST(Optimise, MeasuresApartWhatSeveralUse) {
  auto module = module_of(R"(graph {
    %x: f32[40, 50] = placeholder "x"
    %a: f32[40, 50] = aten::cos(%x)
    %q: f32[40, 50] = plumb::simulate_format(%a, "E4M3-RN", "E5M2-RN")
    %b: f32[40, 50] = aten::cos(%q)
    %c: f32[40, 50] = aten::mul.Tensor(%b, %a)
    output(%c)
  })");
  auto tracked = track_scales(module), fast = compile(tracked, {.fuse = false});
  EXPECT_EQ(count(*fast, "plumb::track_rounded"), 1u);
  EXPECT_EQ(count(*fast, "plumb::track"), count(*tracked, "plumb::track") - 1);
  expect_same_bits(*tracked, *fast, {randn_there({40, 50})});
  const ScalesGraph a = scales_graph(*tracked), b = scales_graph(*fast);
  for (size_t i = 0; i < a.nodes.size(); ++i)
    expect_same_numbers(a.nodes[i].metrics, b.nodes[i].metrics, a.nodes[i].name);
  EXPECT_EQ(to_string(compile(tracked, {.fuse = false, .measure = false})->graph()).find("track_rounded"),
            std::string::npos);
}

TEST(Optimise, StandsInTheTableOfPasses) {
  auto module = derive(*module_of(R"(graph {
    %x: f32[5000] = placeholder "x"
    %a: f32[5000] = aten::mul.Tensor(%x, 3.0)
    %b: f32[5000] = aten::neg(%a)
    output(%b)
  })"));
  std::vector<std::string> lines;
  EXPECT_FALSE(run_pass(find_pass("optimise"), *module, {{"fuse", "false"}}));
  EXPECT_THROW(run_pass(find_pass("optimise"), *module, {{"fuse", "maybe"}}), Error);
  EXPECT_FALSE(run_pass(find_pass("optimise"), *module, {})) << "a short chain on a small tensor";
  EXPECT_THROW(run_pass(find_pass("optimise"), *module, {{"min_elements", "-1"}}), Error);
  EXPECT_THROW(run_pass(find_pass("optimise"), *module, {{"min_elements", "many"}}), Error);
  EXPECT_TRUE(run_pass(find_pass("optimise"), *module, {{"min_elements", "5000"}}, &lines, true));
  EXPECT_FALSE(lines.empty());
  EXPECT_FALSE(run_pass(find_pass("optimise"), *module, {{"min_elements", "0"}}, nullptr, true));
}

}  // namespace
}  // namespace plumb
