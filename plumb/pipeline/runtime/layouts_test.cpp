// Steps at every number of stages and replicas, under every schedule, have the same bits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/graph/plan.h"
#include "plumb/partition/split.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/pipeline/runtime/shared_parameters.h"
#include "plumb/schedule/generators.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/tensors/run_rows.h"
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

// Returns a tied GPT with dropout, of four blocks.
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

// Returns the inputs of one microbatch of all.
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
  Pipeline pipeline(pipe->table(), schedule, stages, groups.pipeline, options);
  for (int step = 0; step < kStepsOfLayout; step++) {
    std::vector<Tensors> inputs;
    for (int m = 0; m < here; m++) inputs.push_back(inputs_of(layout, step, groups.replicas.rank() * here + m));
    const StepResult result = pipeline.step_microbatches(inputs, {}, std::vector<int64_t>(inputs.size(), kRowsOfPart));
    const std::string prefix = std::to_string(step) + "/";
    const bool whole = schedule.placement.reverse_ranks.empty();  // else a rank has some microbatches' losses
    if (result.loss.defined() && whole) report(prefix + "loss", bits_of(result.loss.reshape({1})));
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

// All pipelines of a process draw from its one generator.
TEST(Layouts, OfPipelinesInTheirOwnThreadsHaveTheBitsOfOneThread) {
  constexpr int kThreads = 4, kSteps = 6;
  const RunLayout layout{.stages = 4, .schedule = "LoopedBFS"};
  std::vector<std::shared_ptr<Pipe>> pipes;
  for (int t = 0; t <= kThreads; t++) pipes.push_back(cut_gpt(layout));
  std::vector<Tensors> inputs;
  for (int m = 0; m < kMicrobatchesOfAll; m++) inputs.push_back(inputs_of(layout, 0, m));
  const auto train = [&](const Pipe& pipe) {
    at::set_num_threads(1);
    const Schedule schedule = make_schedule(layout.schedule, 1, kMicrobatchesOfAll, layout.stages);
    PipelineOptions options;
    options.seed = layout.seed;
    Pipeline pipeline(pipe.table(), schedule, stages_of_rank(pipe, schedule, 0), {}, options);
    std::string bits;
    for (int step = 0; step < kSteps; step++)
      bits += bits_of(pipeline.step_microbatches(inputs).loss.reshape({1})) + " ";
    return bits;
  };
  std::vector<std::string> found(pipes.size());
  std::thread([&] { found[kThreads] = train(*pipes[kThreads]); }).join();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) threads.emplace_back([&, t] { found[t] = train(*pipes[t]); });
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; t++) EXPECT_EQ(found[t], found[kThreads]) << t;
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

// A stage's two ranks are two groups of microbatches.
TEST(Layouts, OfAConvnetThatATwoWayTableRunsHaveTheBitsOfTwoGroupsAReplica) {
  for (const int replicas : {1, 2}) {
    RunLayout layout{1, 1, 2 * replicas, "1F1B", "convnet"};
    auto expected = by_this_process(layout);
    std::erase_if(expected, [](const auto& value) { return value.first.ends_with("loss"); });
    layout.stages = 2, layout.replicas = replicas, layout.groups = replicas, layout.schedule = "DualPipe";
    expect_equal_over_processes(layout, 2 * replicas, expected);
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

// Every form of dropout on rows of a batch of 4: whole, behind a batch that heads are folded into, and in attention.
TEST(NodeSeeds, OfDropoutAreThoseOfTheRowHoweverTheBatchIsCut) {
  State state;
  const auto module = testing_models::module_of(
      "graph {\n  %x: f32[4, 6, 8] = placeholder \"x\"\n  %q: f32[4, 2, 6, 8] = placeholder \"q\"\n"
      "  %mask: f32[4, 1, 6, 6] = placeholder \"mask\"\n  %one: f32[6, 6] = placeholder \"one\"\n"
      "  %a = aten::dropout(%x, 0.5, True)\n  %b, %seen = aten::native_dropout(%x, 0.5, True)\n"
      "  %c = aten::feature_dropout(%q, 0.5, True)\n  %heads = aten::flatten.using_ints(%q, 0, 1)\n"
      "  %d = aten::alpha_dropout(%heads, 0.5, True)\n"
      "  %e = aten::scaled_dot_product_attention(%q, %q, %q, %mask, 0.5)\n"
      "  %f = aten::scaled_dot_product_attention(%q, %q, %q, %one, 0.5)\n"
      "  %g = plumb::dropout(%x, 0.5, True)\n"
      "  output(%a, %b, %seen, %c, %d, %e, %f, %g)\n}\n",
      std::move(state));
  const Plan plan(module->graph(), module->state());
  at::manual_seed(1);
  const at::Tensor q = at::rand({1, 2, 6, 8}).expand({4, 2, 6, 8}).contiguous();
  const at::Tensor mask = at::randn({1, 1, 6, 6}).expand({4, 1, 6, 6}).contiguous();
  const auto run = [&](int64_t from, int64_t to, bool rows_known = true) {
    const RunningRows running({from, rows_known ? to - from : 0});
    const NodeSeeds seeds(7, {at::detail::getDefaultCPUGenerator()});
    Tensors results;
    for (const auto& v :
         plan.run({at::ones({to - from, 6, 8}), q.slice(0, from, to), mask.slice(0, from, to), mask[0][0]}))
      results.push_back(v.toTensor());
    return results;
  };
  const Tensors whole = run(0, 4);
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 2, 4}, {0, 1, 4}, {0, 1, 2, 3, 4}}) {
    std::vector<Tensors> parts(whole.size());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const Tensors of_part = run(cuts[i], cuts[i + 1]);
      for (size_t k = 0; k < whole.size(); ++k) parts[k].push_back(of_part[k]);
    }
    for (size_t k = 0; k < whole.size(); ++k) EXPECT_TRUE(at::equal(at::cat(parts[k]), whole[k])) << "result " << k;
  }
  for (size_t k = 0; k < whole.size(); ++k) {
    const int64_t each = whole[k].size(0) / 4;
    EXPECT_FALSE(at::equal(whole[k].slice(0, 0, each), whole[k].slice(0, each, 2 * each)))
        << "rows have masks of their own";
    EXPECT_FALSE(at::equal(whole[k], run(0, 4, false)[k])) << "result " << k << " is not drawn by rows";
  }
}

TEST(NodeSeeds, DrawAMicrobatchAsAWholeWhereItsRowsCannotBeTakenApart) {
  const auto module = testing_models::module_of(
      "graph {\n  %x: f32[6, 4] = placeholder \"x\"\n  %t = aten::t(%x)\n  %y = aten::dropout(%t, 0.5, True)\n"
      "  %z = aten::dropout(%x, 0.5, True)\n"
      "  %e = aten::scaled_dot_product_attention(%x, %x, %x, None, 0.5)\n  output(%y, %z, %e)\n}\n",
      State());
  const Plan plan(module->graph(), module->state());
  const auto run = [&](int64_t rows) {
    const RunningRows running({0, rows});
    const NodeSeeds seeds(7, {at::detail::getDefaultCPUGenerator()});
    return plan.run({at::ones({6, 4})});
  };
  const auto whole = run(0), parted = run(4);
  EXPECT_TRUE(at::equal(parted[0].toTensor(), whole[0].toTensor())) << "rows of a transposed tensor are no pieces";
  EXPECT_EQ(parted[0].toTensor().strides(), at::IntArrayRef({1, 4})) << "as the graph was made for";
  EXPECT_TRUE(at::equal(parted[1].toTensor(), whole[1].toTensor())) << "6 is no multiple of 4";
  EXPECT_TRUE(at::equal(run(3)[2].toTensor(), whole[2].toTensor())) << "attention over the rows needs all of them";
}

// 8 times, 2 layers: a piece of 2 times has as many rows as the state has layers, but it is no batch of its own.
TEST(NodeSeeds, LeaveRecurrentLayersWhole) {
  std::string text = "graph {\n  %x: f32[8, 4, 3] = placeholder \"x\"\n  %h: f32[2, 4, 5] = placeholder \"h\"\n";
  const std::vector<std::vector<int64_t>> sizes{{20, 3}, {20, 5}, {20}, {20}, {20, 5}, {20, 5}, {20}, {20}};
  std::string weights;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::string name = "%w" + std::to_string(i);
    text += "  " + name + ": f32[" + std::to_string(sizes[i][0]);
    text += (sizes[i].size() > 1 ? ", " + std::to_string(sizes[i][1]) : "") + "] = placeholder \"" + name.substr(1) +
            "\"\n";
    weights += (i ? ", " : "") + name;
  }
  text += "  %y, %hn, %cn = aten::lstm.input(%x, [%h, %h], [" + weights + "], True, 2, 0.5, True, False, False)\n";
  const auto module = testing_models::module_of(text + "  output(%y, %hn, %cn)\n}\n", State());
  const Plan plan(module->graph(), module->state());
  at::manual_seed(1);
  std::vector<c10::IValue> inputs{at::randn({8, 4, 3}), at::zeros({2, 4, 5})};
  for (const auto& size : sizes) inputs.emplace_back(at::randn(size));
  const auto run = [&](int64_t rows) {
    const RunningRows running({0, rows});
    const NodeSeeds seeds(7, {at::detail::getDefaultCPUGenerator()});
    return plan.run(inputs);
  };
  const auto whole = run(0), of_rows = run(4);
  for (size_t k = 0; k < whole.size(); ++k) EXPECT_TRUE(at::equal(of_rows[k].toTensor(), whole[k].toTensor())) << k;
}

}  // namespace
}  // namespace plumb
