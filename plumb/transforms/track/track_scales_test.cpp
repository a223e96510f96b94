#include "plumb/transforms/track/track_scales.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_models;

const char* kSmall = R"(graph {
    %x: f32[16, 8] = placeholder "x"
    %i: i64[16] = placeholder "i"
    %w = get_attr "w"
    %y: f32[16, 8] = aten::linear(%x, %w)
    %z: f32[8, 16] = aten::t(%y)
    [%a: f32[8, 8], %b: f32[8, 8]] = aten::chunk(%z, 2, 1)
    %s: f32[8, 8] = aten::mul.Tensor(%a, %b)
    %o: f32[] = aten::sum(%s)
    %n: i64[16] = aten::neg(%i)
    output(%o, %n)
  })";

std::shared_ptr<GraphModule> small() {
  at::manual_seed(4);
  State state;
  parameter(state, "w", randn_there({8, 8}));
  return module_of(kSmall, std::move(state));
}

void expect_metrics(const Metrics::Data& got, const at::Tensor& t, const std::string& what) {
  const at::Tensor d = t.detach().to(at::kDouble);
  EXPECT_NEAR(got.mean_abs, d.abs().mean().item<double>(), 1e-6 * (1 + got.mean_abs)) << what;
  EXPECT_NEAR(got.abs_mean, d.mean().abs().item<double>(), 1e-6 * (1 + got.mean_abs)) << what;
  EXPECT_EQ(got.abs_max, d.abs().max().item<double>()) << what;
  EXPECT_EQ(got.abs_min, d.abs().min().item<double>()) << what;
  EXPECT_EQ(got.numel, d.numel()) << what;
  if (d.numel() > 1) {
    EXPECT_NEAR(got.std, d.std().item<double>(), 1e-6 * (1 + got.std)) << what;
  }
}

TEST(TrackScales, MeasuresEveryTensorAndGradientAsTorchDoes) {
  auto module = small();
  auto tracked = track_scales(module);
  at::Tensor x = randn_there({16, 8}), i = there(at::arange(16));
  tracked->run({x, i})[0].toTensor().backward();
  const ScalesGraph graph = scales_graph(*tracked);

  at::Tensor xe = x.detach().clone().requires_grad_(),
             w = module->state().get("w").tensor.detach().clone().requires_grad_();
  at::Tensor y = at::linear(xe, w);
  y.retain_grad();
  at::Tensor z = y.t();
  z.retain_grad();
  auto parts = z.chunk(2, 1);
  for (auto& part : parts) part.retain_grad();
  at::Tensor s = parts[0] * parts[1];
  s.retain_grad();
  at::Tensor o = s.sum();
  o.retain_grad();
  o.backward();
  const std::pair<const char*, at::Tensor> all[] = {{"x", xe},       {"w", w},        {"y", y}, {"z", z},
                                                    {"a", parts[0]}, {"b", parts[1]}, {"s", s}, {"o", o}};
  for (const auto& [name, tensor] : all) {
    const ScaleNode* node = graph.find(name);
    ASSERT_TRUE(node && node->metrics && node->metrics->bwd) << name;
    expect_metrics(node->metrics->fwd, tensor, std::string(name) + " forward");
    expect_metrics(*node->metrics->bwd, tensor.grad(), std::string(name) + " backward");
  }
  EXPECT_FALSE(graph.find("i")->metrics || graph.find("i")->is_float_tensor);
  EXPECT_TRUE(graph.find("w")->requires_grad);
  EXPECT_EQ(graph.find("b")->result_index, 1u);
}

TEST(TrackScales, DoesNotTouchTheCallersTensors) {
  auto tracked = track_scales(small());
  at::Tensor x = randn_there({16, 8}), i = there(at::arange(16));
  const at::Tensor copy = x.clone();
  tracked->run({x, i})[0].toTensor().backward();
  EXPECT_FALSE(x.requires_grad());
  EXPECT_FALSE(x.grad().defined());
  EXPECT_TRUE(at::equal(x, copy));
  at::Tensor leaf = copy.clone().requires_grad_();
  tracked->run({leaf, i})[0].toTensor().backward();
  EXPECT_TRUE(leaf.grad().defined());
  EXPECT_TRUE(leaf.is_leaf());
  // A tensor with a history of its own: its gradient is the same, and nothing stays hooked to it.
  at::Tensor base = copy.clone().requires_grad_(), made = base * 1.0;
  tracked->run({made, i})[0].toTensor().backward();
  EXPECT_TRUE(at::equal(base.grad(), leaf.grad()));
  EXPECT_TRUE(made.grad_fn()->tensor_pre_hooks().empty());
}

TEST(TrackScales, GivesTheValuesAndGradientsOfTheModuleBitForBit) {
  at::manual_seed(0);
  auto module = gpt();
  auto tracked = track_scales(module);
  const auto inputs = gpt_inputs();
  const at::Tensor plain = module->run(inputs)[0].toTensor();
  plain.backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& p : module->named_parameters()) gradients[p.key()] = p.value().grad().clone();
  for (const at::Tensor& p : module->parameters()) p.mutable_grad() = at::Tensor();
  const at::Tensor loss = tracked->run(inputs)[0].toTensor();
  loss.backward();
  EXPECT_TRUE(at::equal(plain, loss));
  for (const auto& p : tracked->named_parameters())
    EXPECT_TRUE(at::equal(p.value().grad(), gradients[p.key()])) << p.key();
}

TEST(TrackScales, GivesTheBitsOfAttentionWhoseMaskIsAnInput) {
  at::manual_seed(0);
  State state;
  parameter(state, "w", randn_there({4, 4}));
  auto module = module_of(R"(graph {
    %x: f32[2, 2, 5, 4] = placeholder "x"
    %bias: f32[2, 1, 1, 5] = placeholder "bias"
    %w = get_attr "w"
    %q: f32[2, 2, 5, 4] = aten::linear(%x, %w)
    %mask: f32[2, 2, 5, 5] = aten::expand(%bias, [2, 2, 5, 5])
    %o: f32[2, 2, 5, 4] = aten::scaled_dot_product_attention(%q, %q, %x, %mask)
    output(%o)
  })",
                          std::move(state));
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = randn_there({2, 2, 5, 4}), bias = randn_there({2, 1, 1, 5});
    EXPECT_TRUE(at::equal(module->run({x, bias})[0].toTensor(), track_scales(module)->run({x, bias})[0].toTensor()));
  }
}

TEST(TrackScales, MeasuresForwardOnlyWithoutGradients) {
  auto tracked = track_scales(small());
  at::NoGradGuard no_grad;
  tracked->run({randn_there({16, 8}), there(at::arange(16))});
  const ScalesGraph graph = scales_graph(*tracked);
  EXPECT_TRUE(graph.find("s")->metrics);
  EXPECT_FALSE(graph.find("s")->metrics->bwd);
}

TEST(TrackScales, ForgetsTheLastGradientWhenItRunsForwardAgain) {
  auto tracked = track_scales(small());
  const std::vector<c10::IValue> inputs{randn_there({16, 8}), there(at::arange(16))};
  tracked->run(inputs)[0].toTensor().backward();
  EXPECT_TRUE(scales_graph(*tracked).find("s")->metrics->bwd);
  auto held = tracked->run(inputs);
  EXPECT_FALSE(scales_graph(*tracked).find("s")->metrics->bwd);
}

TEST(TrackScales, TellsApartTheGradientsOfTwoNamesOfOneTensor) {
  // Dropout that does not drop hands its input back: one tensor, two values, and only one of two uses each.
  auto tracked = track_scales(module_of(R"(graph { %x: f32[4] = placeholder "x" %m: f32[4] = aten::mul.Tensor(%x, 1.0)
      %d: f32[4] = aten::dropout(%m, 0.5, False) %e: f32[4] = aten::mul.Tensor(%d, 3.0) %f: f32[4] = aten::add.Tensor(%e, %m)
      %o: f32[] = aten::sum(%f) output(%o) })"));
  tracked->run({ones_there({4})})[0].toTensor().backward();
  const ScalesGraph graph = scales_graph(*tracked);
  EXPECT_EQ(graph.find("d")->metrics->bwd->abs_max, 3.0);
  EXPECT_EQ(graph.find("m")->metrics->bwd->abs_max, 4.0);
}

TEST(TrackScales, FollowsWritesInPlace) {
  auto module = module_of(R"(graph { %x: f32[4] = placeholder "x" %m: f32[4] = aten::mul.Tensor(%x, 2.0)
      %a: f32[4] = aten::mul_.Tensor(%m, 5.0) %o: f32[] = aten::sum(%m) output(%o) })");
  auto tracked = track_scales(module);
  const at::Tensor loss = tracked->run({ones_there({4})})[0].toTensor();
  EXPECT_EQ(loss.item<double>(), 40.0);
  loss.backward();
  EXPECT_EQ(scales_graph(*tracked).find("x")->metrics->bwd->abs_max, 10.0);
}

TEST(TrackScales, MeasuresTheGradientOfAParameterThatTheForwardWritesWithoutGradients) {
  State state;
  parameter(state, "w", ones_there({4}));
  auto tracked = track_scales(module_of(R"(graph { %x: f32[4] = placeholder "x" %w = get_attr "w"
      %d: f32[4] = aten::detach(%w) %c: f32[4] = aten::clamp_(%d, -0.5, 0.5)
      %m: f32[4] = aten::mul.Tensor(%x, %w) %o: f32[] = aten::sum(%m) output(%o) })",
                                        std::move(state)));
  const at::Tensor loss = tracked->run({ones_there({4}) * 3})[0].toTensor();
  EXPECT_EQ(loss.item<double>(), 6.0);
  loss.backward();
  ASSERT_TRUE(scales_graph(*tracked).find("w")->metrics->bwd);
  EXPECT_EQ(scales_graph(*tracked).find("w")->metrics->bwd->abs_max, 3.0);
}

TEST(TrackScales, KeepsHistogramsWhereAskedTo) {
  auto tracked = track_scales(small(), MetricsOptions{true});
  tracked->run({randn_there({16, 8}), there(at::arange(16))})[0].toTensor().backward();
  const ScalesGraph graph = scales_graph(*tracked);
  ASSERT_TRUE(graph.find("y")->metrics->bwd->histogram);
  int64_t total = 0;
  for (int64_t count : graph.find("y")->metrics->fwd.histogram->counts) total += count;
  EXPECT_EQ(total, 128);
  EXPECT_THAT(graph.to_json(), HasSubstr("\"exponents\""));
}

TEST(TrackScales, SwitchesOff) {
  auto tracked = track_scales(small());
  tracked->tracker->set_enabled(false);
  tracked->run({randn_there({16, 8}), there(at::arange(16))})[0].toTensor().backward();
  EXPECT_FALSE(scales_graph(*tracked).find("y")->metrics);
}

TEST(TrackScales, HandsTensorsOnWhenTheTrackerIsGone) {
  auto tracked = track_scales(small());
  at::Tensor x = randn_there({16, 8});
  const at::Tensor before = tracked->run({x, there(at::arange(16))})[0].toTensor();
  tracked->tracker.reset();
  EXPECT_TRUE(at::equal(tracked->run({x, there(at::arange(16))})[0].toTensor(), before));
  EXPECT_THROW(scales_graph(*tracked), Error);
}

TEST(TrackScales, MeasuresCopiesApart) {
  auto tracked = track_scales(small());
  auto copy = std::dynamic_pointer_cast<TransformedModule>(tracked->clone());
  copy->run({randn_there({16, 8}), there(at::arange(16))})[0].toTensor().sum().backward();
  EXPECT_FALSE(scales_graph(*tracked).find("y")->metrics);
  EXPECT_TRUE(scales_graph(*copy).find("y")->metrics);
  EXPECT_TRUE(scales_graph(*copy).find("x")->metrics->bwd) << "of an input that requires no gradient";
}

TEST(TrackScales, NestsWithTheOtherTransformsInEveryOrder) {
  at::manual_seed(6);
  auto module = gpt();
  SimulateFormatOptions options;
  options.fwd = "e4m3fn-RN", options.bwd = "e5m2-RN";
  auto u = [](const std::shared_ptr<GraphModule>& m) { return std::static_pointer_cast<GraphModule>(unit_scale(m)); };
  auto s = [&](const std::shared_ptr<GraphModule>& m) {
    return std::static_pointer_cast<GraphModule>(simulate_format(m, options));
  };
  auto t = [](const std::shared_ptr<GraphModule>& m) { return std::static_pointer_cast<GraphModule>(track_scales(m)); };
  const auto inputs = gpt_inputs();
  const at::Tensor expected = s(u(module))->run(inputs)[0].toTensor();
  for (const auto& nested :
       {t(s(u(module))), s(t(u(module))), s(u(t(module))), t(u(s(module))), u(t(s(module))), u(s(t(module)))}) {
    nested->lint();
    const at::Tensor loss = nested->run(inputs)[0].toTensor();
    EXPECT_TRUE(at::equal(loss, expected)) << to_string(nested->graph());
    loss.backward();
    const auto graph = scales_graph(dynamic_cast<const TransformedModule&>(*nested));
    EXPECT_TRUE(graph.find("qkv1")->metrics && graph.find("qkv1")->metrics->bwd);
    EXPECT_EQ(graph.find("qkv1")->target, "plumb::linear");
  }
}

TEST(TrackScales, TracksOnlyWhatIsNewTheSecondTime) {
  auto once = track_scales(small());
  auto twice = track_scales(once);
  EXPECT_EQ(to_string(twice->graph()).find("tracked_tracked"), std::string::npos);
  twice->run({randn_there({16, 8}), there(at::arange(16))});
  EXPECT_TRUE(scales_graph(*twice).find("y")->metrics);
}

TEST(TrackScales, RunsFromTheTableOfPasses) {
  auto module = small();
  const at::Tensor x = randn_there({16, 8});
  const at::Tensor before = module->run({x, there(at::arange(16))})[0].toTensor();
  EXPECT_TRUE(run_pass(find_pass("track_scales"), *module, {}, nullptr, true));
  EXPECT_FALSE(run_pass(find_pass("track_scales"), *module, {}, nullptr, true));
  EXPECT_TRUE(at::equal(module->run({x, there(at::arange(16))})[0].toTensor(), before));
}

// --- pruning

ScalesGraph run_small() {
  auto tracked = track_scales(small());
  tracked->run({randn_there({16, 8}), there(at::arange(16))})[0].toTensor().backward();
  return scales_graph(*tracked);
}

std::vector<std::string> names(const ScalesGraph& graph) {
  std::vector<std::string> all;
  for (const auto& node : graph.nodes) all.push_back(node.name);
  return all;
}

std::vector<std::string> inputs_of(const ScalesGraph& graph, const char* name) {
  std::vector<std::string> all;
  for (size_t i : graph.find(name)->inputs) all.push_back(graph.nodes[i].name);
  return all;
}

TEST(Prune, TakesOutWhatIsNoFloatingPointTensor) {
  const ScalesGraph graph = run_small(), pruned = prune_non_float_tensors(graph);
  EXPECT_THAT(names(pruned), testing::ElementsAre("x", "w", "y", "z", "a", "b", "s", "o", "output"));
  EXPECT_THAT(inputs_of(pruned, "output"), testing::ElementsAre("o"));
  EXPECT_EQ(graph.nodes.size(), 11u) << "the graph given stays as it was";
}

TEST(Prune, JoinsAroundANonFloatNodeWithOneFloatInput) {
  ScalesGraph graph;
  auto add = [&](const char* name, std::vector<size_t> inputs, bool is_float) {
    ScaleNode node;
    node.name = node.target = name;
    node.inputs = std::move(inputs);
    node.is_float_tensor = is_float;
    graph.nodes.push_back(node);
  };
  add("x", {}, true);
  add("shape", {0}, false);
  add("y", {1}, true);
  add("mask", {0, 2}, false);
  add("z", {3, 2}, true);
  const ScalesGraph pruned = prune_non_float_tensors(graph);
  EXPECT_THAT(names(pruned), testing::ElementsAre("x", "y", "z"));
  EXPECT_THAT(inputs_of(pruned, "y"), testing::ElementsAre("x"));
  EXPECT_THAT(inputs_of(pruned, "z"), testing::ElementsAre("y"));
}

TEST(Prune, TakesOutNodesOfTheSameScale) {
  const ScalesGraph pruned = prune_same_scale_tensors(prune_non_float_tensors(run_small()));
  // A transpose changes nothing; halves of a tensor have another scale; a node of two inputs stays.
  EXPECT_THAT(names(pruned), testing::ElementsAre("x", "w", "y", "a", "b", "s", "o", "output"));
  EXPECT_THAT(inputs_of(pruned, "a"), testing::ElementsAre("y"));
  const ScalesGraph all = prune_same_scale_tensors(prune_non_float_tensors(run_small()), 1e6);
  EXPECT_THAT(names(all), testing::ElementsAre("x", "w", "y", "s", "output"));
  EXPECT_THAT(inputs_of(all, "s"), testing::ElementsAre("y", "y"));
}

TEST(Prune, LeavesAGraphWhoseScalesWereNotMeasured) {
  const ScalesGraph unmeasured = scales_graph(*track_scales(small()));
  EXPECT_EQ(prune_same_scale_tensors(unmeasured).to_json(), unmeasured.to_json());
}

TEST(Prune, TakesOutSelectedOperators) {
  const ScalesGraph pruned = prune_selected_nodes(run_small(), {"aten::chunk", "aten::t", "w"});
  EXPECT_THAT(names(pruned), testing::ElementsAre("x", "i", "y", "s", "o", "n", "output"));
  EXPECT_THAT(inputs_of(pruned, "s"), testing::ElementsAre("y"));
  EXPECT_THAT(inputs_of(pruned, "y"), testing::ElementsAre("x"));
  EXPECT_THAT(message_of([] { prune_selected_nodes(run_small(), std::function<bool(const ScaleNode&)>()); }),
              testing::HasSubstr("prune_selected_nodes: the function is empty"));
}

TEST(Prune, TakesAHundredThousandNodes) {
  ScalesGraph graph;
  for (size_t i = 0; i < 100'000; ++i) {
    ScaleNode node;
    node.name = "n" + std::to_string(i);
    node.target = i % 1000 == 0 ? "aten::linear" : "aten::add.Tensor";
    if (i > 0) node.inputs = {i - 1, i / 2};
    node.is_float_tensor = i % 3 != 0;
    node.metrics.emplace().fwd.mean_abs = i % 5 == 0 ? 1 : 2;
    graph.nodes.push_back(std::move(node));
  }
  EXPECT_EQ(prune_selected_nodes(graph, {"aten::add"}).nodes.size(), 100u);
  EXPECT_EQ(prune_non_float_tensors(graph).nodes.size(), 66'666u);
  // Inputs of i are i - 1 and i / 2. A node goes if just one of them is a float, and that one is of its scale.
  const ScalesGraph pruned = prune_same_scale_tensors(graph);
  size_t stay = 0;
  std::vector<size_t> stands(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    stands[i] = i;
    std::vector<size_t> floats;
    for (size_t input : graph.nodes[i].inputs) {
      if (graph.nodes[stands[input]].is_float_tensor) floats.push_back(stands[input]);
    }
    const bool same =
        floats.size() == 1 && graph.nodes[floats[0]].metrics->fwd.mean_abs == graph.nodes[i].metrics->fwd.mean_abs;
    if (graph.nodes[i].is_float_tensor && same) {
      stands[i] = floats[0];
    } else {
      ASSERT_EQ(pruned.nodes.at(stay++).name, graph.nodes[i].name);
    }
  }
  EXPECT_EQ(pruned.nodes.size(), stay);
  EXPECT_LT(stay, 95'000u);
}

}  // namespace
}  // namespace plumb
