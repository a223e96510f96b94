// The same steps at every number of stages and replicas, under every schedule: the same bits.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "plumb/core/error.h"
#include "plumb/graph/node_seeds.h"
#include "plumb/partition/split.h"
#include "plumb/pipeline/graph_stage.h"
#include "plumb/pipeline/processes_test.h"
#include "plumb/pipeline/runtime.h"
#include "plumb/pipeline/shared_parameters.h"
#include "plumb/schedule/generators.h"
#include "tests/gpt_graph.h"

namespace plumb {
namespace {

using namespace testing_processes;

constexpr int kMicrobatchesOfAll = 8, kRowsOfPart = 2, kGroups = 4, kStepsOfLayout = 2;

struct RunLayout {
  int stages = 1, replicas = 1, groups = kGroups;
  std::string schedule = "GPipe", model = "gpt";
  MultiUse multi_use = MultiUse::Transmit;
  uint64_t seed = 5;

  std::string text() const {
    return model + "," + std::to_string(stages) + "," + std::to_string(replicas) + "," + std::to_string(groups) + "," +
           schedule + "," + (multi_use == MultiUse::Transmit ? "transmit" : "replicate");
  }
  static RunLayout parse(const std::string& text) {
    RunLayout layout;
    std::istringstream fields(text);
    std::string stages, replicas, groups, use;
    std::getline(fields, layout.model, ',');
    for (auto* field : {&stages, &replicas, &groups, &layout.schedule, &use}) std::getline(fields, *field, ',');
    layout.stages = std::stoi(stages);
    layout.replicas = std::stoi(replicas);
    layout.groups = std::stoi(groups);
    layout.multi_use = use == "transmit" ? MultiUse::Transmit : MultiUse::Replicate;
    return layout;
  }
};

// A tied GPT with dropout, of four blocks.
std::shared_ptr<Pipe> cut_gpt(const RunLayout& layout) {
  at::manual_seed(0);
  testing_models::GptConfig config;
  config.layers = 4;
  config.width = 16;
  config.heads = 2;
  config.length = 8;
  config.batch = kRowsOfPart;
  config.vocabulary = 32;
  config.dropout = 0.3;
  SplitOptions options;
  options.multi_use = layout.multi_use;
  for (int s = 1; s < layout.stages; s++)
    options.points.emplace_back("blocks." + std::to_string(4 * s / layout.stages), SplitPoint::Beginning);
  return pipeline(*testing_models::gpt(config), options);
}

// Convolutions with batch norm, and dropout behind them.
std::shared_ptr<Pipe> cut_convnet(const RunLayout& layout) {
  at::manual_seed(0);
  State state;
  std::string text = "graph {\n  %x: f32[2, 4, 6, 6] = placeholder \"x\"\n  %t: f32[2, 4, 6, 6] = placeholder \"t\"\n";
  std::string x = "%x";
  for (int i = 0; i < 4; i++) {
    const std::string n = std::to_string(i), path = "blocks." + n;
    testing_models::parameter(state, path + ".conv.weight", at::randn({4, 4, 3, 3}) / 6);
    testing_models::parameter(state, path + ".norm.weight", at::ones({4}));
    testing_models::parameter(state, path + ".norm.bias", at::zeros({4}));
    state.add({path + ".norm.running_mean", AttrKind::Buffer, at::zeros({4})});
    state.add({path + ".norm.running_var", AttrKind::Buffer, at::ones({4})});
    const std::string in = " in \"\":\"Net\" \"" + path + "\":\"Block\"\n";
    for (const char* name : {"conv.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}) {
      std::string id = name + n;
      std::replace(id.begin(), id.end(), '.', '_');
      text += "  %" + id + " = get_attr \"" + path + "." + name + "\"\n";
    }
    text += "  %c" + n + " = aten::conv2d(" + x + ", %conv_weight" + n + ", None, [1, 1], [1, 1], [1, 1], 1)" + in;
    text += "  %b" + n + " = aten::batch_norm(%c" + n + ", %norm_weight" + n + ", %norm_bias" + n +
            ", %norm_running_mean" + n + ", %norm_running_var" + n + ", True, 0.1, 1e-05, False)" + in;
    text += "  %r" + n + " = aten::relu(%b" + n + ")" + in;
    text += "  %y" + n + " = aten::dropout(%r" + n + ", 0.2, True)" + in;
    x = "%y" + n;
  }
  text += "  %loss = aten::mse_loss(" + x + ", %t)\n  output(%loss)\n}\n";
  SplitOptions options;
  for (int s = 1; s < layout.stages; s++)
    options.points.emplace_back("blocks." + std::to_string(4 * s / layout.stages), SplitPoint::Beginning);
  return pipeline(*testing_models::module_of(text, std::move(state)), options);
}

// The inputs of one microbatch of all.
Tensors inputs_of(const RunLayout& layout, int step, int microbatch) {
  at::manual_seed(static_cast<uint64_t>(1000 * step + microbatch));
  if (layout.model == "gpt") return {at::randint(32, {kRowsOfPart, 8}), at::randint(32, {kRowsOfPart, 8})};
  return {at::randn({kRowsOfPart, 4, 6, 6}), at::randn({kRowsOfPart, 4, 6, 6})};
}

std::string bits_of(const at::Tensor& t) { return std::to_string(content_hash(t)); }

using ReportBits = std::function<void(const std::string&, const std::string&)>;

void train_layout(const RunLayout& layout, const ReplicatedGroups& groups, const ReportBits& report) {
  const auto pipe = layout.model == "gpt" ? cut_gpt(layout) : cut_convnet(layout);
  const int ranks = groups.pipeline.size(), here = kMicrobatchesOfAll / layout.replicas;
  const Schedule schedule = make_schedule(layout.schedule, ranks, here, layout.stages / ranks);
  const auto stages = stages_of_rank(*pipe, schedule, groups.pipeline.rank());
  PipelineOptions options;
  options.seed = layout.seed;
  options.replicas = groups.replicas;
  options.gradient_groups = layout.groups;
  Pipeline pipeline(make_layout(pipe->table()), schedule, stages, groups.pipeline, options);
  for (int step = 0; step < kStepsOfLayout; step++) {
    std::vector<Tensors> inputs;
    for (int m = 0; m < here; m++) inputs.push_back(inputs_of(layout, step, groups.replicas.rank() * here + m));
    const StepResult result = pipeline.step_microbatches(inputs, {}, std::vector<int64_t>(inputs.size(), kRowsOfPart));
    const std::string prefix = std::to_string(step) + "/";
    if (result.loss.defined()) report(prefix + "loss", bits_of(result.loss.reshape({1})));
    for (const auto& [s, stage] : stages) {
      for (const auto& p : stage->parameters()) {
        report(prefix + p.name, bits_of(p.tensor.grad()));
        const at::NoGradGuard no_grad;
        p.tensor.detach().sub_(p.tensor.grad(), 0.1);
        p.tensor.mutable_grad() = at::Tensor();
      }
      for (const Attr& attr : std::static_pointer_cast<GraphStage>(stage)->module()->state()) {
        if (attr.kind == AttrKind::Buffer) report(prefix + attr.name, bits_of(attr.tensor));
      }
    }
  }
}

Role layouts_role("layouts", [] {
  const RunLayout layout = RunLayout::parse(setting("LAYOUT"));
  const auto world = make_group_from_environment({std::chrono::seconds(60)});
  train_layout(layout, divide_into_replicas(world, layout.replicas), report);
  return 0;
});

std::map<std::string, std::string> by_this_process(const RunLayout& layout) {
  std::map<std::string, std::string> values;
  train_layout(layout, {}, [&](const std::string& key, const std::string& value) { values[key] = value; });
  return values;
}

void expect_equal_over_processes(const RunLayout& layout, int processes,
                                 const std::map<std::string, std::string>& expected) {
  const auto run = run_role("layouts", processes, {{"LAYOUT", layout.text()}}, std::chrono::seconds(60));
  ASSERT_EQ(run.result.exit_code(), 0) << layout.text() << "\n" << run.errors[0] << run.errors[1];
  std::set<std::string> found;
  for (const auto& reports : run.reports) {
    for (const auto& [key, value] : reports) {
      ASSERT_TRUE(expected.count(key)) << layout.text() << " has " << key;
      EXPECT_EQ(value, expected.at(key)) << layout.text() << ": " << key;
      found.insert(key);
    }
  }
  for (const auto& [key, value] : expected) {
    EXPECT_TRUE(found.count(key)) << layout.text() << " lacks " << key;
  }
}

TEST(Layouts, OfATiedGptWithDropoutHaveTheSameBits) {
  const auto expected = by_this_process({});
  EXPECT_NE(expected, by_this_process({.seed = 6})) << "masks do not depend on the seed";
  EXPECT_NE(expected, by_this_process({.groups = 1})) << "groups change no order";
  for (const auto& [stages, schedule] : {std::pair{2, "LoopedBFS"}, {4, "LoopedBFS"}, {4, "Interleaved1F1B"}})
    EXPECT_EQ(expected, by_this_process({.stages = stages, .schedule = schedule})) << stages << schedule;
  for (const auto& [processes, layout] : {std::pair{2, RunLayout{2, 1, kGroups, "1F1B"}},
                                          {2, RunLayout{4, 1, kGroups, "ZBVZeroBubble"}},
                                          {2, RunLayout{1, 2}},
                                          {4, RunLayout{1, 4}},
                                          {4, RunLayout{2, 2, kGroups, "ZBH1"}},
                                          {4, RunLayout{4, 2, kGroups, "Interleaved1F1B"}}})
    expect_equal_over_processes(layout, processes, expected);
}

TEST(Layouts, OfReplicatedWeightsHaveTheSameBitsForEveryNumberOfReplicas) {
  RunLayout layout{2, 1, kGroups, "GPipe", "gpt", MultiUse::Replicate};
  layout.schedule = "LoopedBFS";
  const auto expected = by_this_process(layout);
  layout.schedule = "GPipe";
  layout.replicas = 2;
  expect_equal_over_processes(layout, 4, expected);
}

TEST(Layouts, OfAConvnetWithBatchNormHaveTheSameBits) {
  RunLayout whole;
  whole.model = "convnet";
  const auto expected = by_this_process(whole);
  EXPECT_TRUE(expected.count("1/blocks.3.norm.running_var"));
  for (const auto& [processes, stages, replicas, schedule] :
       {std::tuple{2, 4, 1, "Interleaved1F1B"}, {2, 2, 1, "ZBH1"}, {2, 1, 2, "GPipe"}, {4, 2, 2, "1F1B"}}) {
    RunLayout layout = whole;
    layout.stages = stages;
    layout.replicas = replicas;
    layout.schedule = schedule;
    expect_equal_over_processes(layout, processes, expected);
  }
}

TEST(Layouts, RefuseGroupsThatAreNone) {
  for (const auto& [groups, says] : {std::pair{3, "8 microbatches"}, {16, "8 microbatches"}, {-1, "1 replicas"}}) {
    try {
      by_this_process({.groups = groups});
      FAIL() << groups;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::InvalidArgument);
      EXPECT_THAT(e.what(), ::testing::HasSubstr(says));
    }
  }
}

TEST(NodeSeeds, AreThoseOfSeedAndNode) {
  at::manual_seed(1);
  std::vector<uint64_t> drawn;
  for (const uint64_t node : {1, 2, 1}) {
    const NodeSeeds seeds(7, {at::detail::getDefaultCPUGenerator()});
    seed_node(node);
    drawn.push_back(static_cast<uint64_t>(at::randint(INT64_MAX, {1}).item<int64_t>()));
  }
  EXPECT_EQ(drawn[0], drawn[2]);
  EXPECT_NE(drawn[0], drawn[1]);
}

}  // namespace
}  // namespace plumb
