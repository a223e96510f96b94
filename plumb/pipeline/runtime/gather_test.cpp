// Gathering over processes, compared with one process that has everything.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using namespace testing_processes;

constexpr int kGathered = 4, kGatheredSteps = 2;

std::string exact_text(const at::Tensor& loss) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", loss.item<double>());
  return text;
}

// A model whose batches do not divide, trained under SCHEDULE by REPLICAS pipelines of two ranks.
Role loss_role("gather_loss", [] {
  const auto world = test_group(std::chrono::seconds(60));
  const auto groups = divide_into_replicas(world, number_setting("REPLICAS", 1));
  const auto schedule = make_schedule(setting("SCHEDULE"), groups.pipeline.size(), kGathered);
  const auto model = test_model("ragged", schedule.num_stages());
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s : schedule.placement.stages_of(groups.pipeline.rank())) stages[s] = model.make_stage(s);
  PipelineOptions options;
  options.loss = model.loss;
  options.replicas = groups.replicas;
  Pipeline pipeline(model.layout, schedule, stages, groups.pipeline, options);
  for (int step = 0; step < kGatheredSteps; step++) {
    const auto [inputs, targets] = model.batch(step + groups.replicas.rank());
    pipeline.step(inputs, targets);
    const at::Tensor loss = pipeline.gather_loss();
    report("loss" + std::to_string(step), loss.defined() ? exact_text(loss) : "none");
  }
  return 0;
});

// Returns the same losses in one process: by replica, then their mean by rows. The weights stay as they are.
std::string expected_loss(int num_stages, int replicas, int step) {
  const auto model = test_model("ragged", num_stages);
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s = 0; s < num_stages; s++) stages[s] = model.make_stage(s);
  PipelineOptions options;
  options.loss = model.loss;
  Pipeline pipeline(model.layout, make_schedule("LoopedBFS", 1, kGathered, num_stages), stages, {}, options);
  std::vector<at::Tensor> losses;
  double rows = 0, sum = 0;
  for (int r = 0; r < replicas; r++) {
    const auto [inputs, targets] = model.batch(step + r);
    pipeline.step(inputs, targets);
    losses.push_back(pipeline.gather_loss());
    rows += static_cast<double>(inputs[0].size(0));
  }
  if (replicas == 1) return exact_text(losses[0]);
  for (int r = 0; r < replicas; r++) {
    sum += losses[r].item<double>() * static_cast<double>(model.batch(step + r).first[0].size(0));
  }
  return exact_text(at::scalar_tensor(sum / rows, at::kFloat));
}

TEST(GatherLoss, IsTheBatchsOnOneRankUnderOneWayAndTwoWaySchedules) {
  for (const std::string schedule : {"1F1B", "ZBVZeroBubble", "DualPipe"}) {
    for (int replicas : {1, 2}) {
      const auto run =
          run_role("gather_loss", 2 * replicas, {{"SCHEDULE", schedule}, {"REPLICAS", std::to_string(replicas)}});
      ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1];
      const auto table = make_schedule(schedule, 2, kGathered);
      const int teller = table.placement.rank_of(table.num_stages() - 1, 0);
      for (int step = 0; step < kGatheredSteps; step++) {
        const std::string name = "loss" + std::to_string(step);
        for (int rank = 0; rank < 2 * replicas; rank++) {
          const std::string expected = rank % 2 == teller ? expected_loss(table.num_stages(), replicas, step) : "none";
          EXPECT_EQ(run.reports[rank].at(name), expected) << schedule << ", rank " << rank << ", " << name;
        }
      }
    }
  }
}

TEST(GatherLoss, IsUndefinedWhereThereWereNoTargets) {
  const auto model = test_model("mlp", 2);
  std::map<int, std::shared_ptr<StageFunction>> stages{{0, model.make_stage(0)}, {1, model.make_stage(1)}};
  PipelineOptions options;
  options.loss = model.loss;
  Pipeline pipeline(model.layout, make_schedule("LoopedBFS", 1, 2, 2), stages, {}, options);
  EXPECT_FALSE(pipeline.gather_loss().defined()) << "nothing ran";
  const auto [inputs, targets] = model.batch(0);
  pipeline.step(inputs, targets);
  EXPECT_TRUE(pipeline.gather_loss().defined());
  pipeline.eval(inputs);
  EXPECT_FALSE(pipeline.gather_loss().defined());
}

// Every rank writes to its own stages' tensors alone.
Role state_role("gather_state", [] {
  const auto group = test_group(std::chrono::seconds(60));
  const auto schedule = make_schedule("ZBVZeroBubble", group.size(), kGathered);
  const int stages = schedule.num_stages();
  TestTokens model(stages, 6);
  SplitOptions options;
  for (int s = 1; s < stages; s++) options.points.emplace_back("layer" + std::to_string(s), SplitPoint::Beginning);
  const auto graph = capture(model, at::zeros({2, 4}, at::kLong));
  const auto pipe = pipeline(*graph, options);
  for (int s : schedule.placement.stages_of(group.rank())) {
    for (const Attr& attr : pipe->stage(s)->state()) attr.tensor.detach().fill_(100 + s);
  }
  gather_state(*pipe, schedule, group);
  for (int s = 0; s < stages; s++) {
    for (const Attr& attr : pipe->stage(s)->state()) {
      const bool theirs = attr.kind == AttrKind::Constant || at::all(attr.tensor == 100 + s).item<bool>();
      report(attr.name, theirs ? std::to_string(s) : "another stage's or none");
    }
  }
  return 0;
});

TEST(GatherState, GivesEveryRankTheTensorsOfEveryStage) {
  const auto run = run_role("gather_state", 2);
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1];
  for (const auto& of_rank : run.reports) {
    EXPECT_EQ(of_rank.at("layer0"), "0");
    EXPECT_EQ(of_rank.at("layer1"), "1");
    EXPECT_EQ(of_rank.at("layer3"), "3");
    EXPECT_EQ(of_rank.at("head"), "3");
  }
}

}  // namespace
}  // namespace plumb
