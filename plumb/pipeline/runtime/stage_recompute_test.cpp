// Stages whose backward computes cheap results again.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/autograd/recompute/live_bytes.h"
#include "plumb/autograd/recompute/recompute_testing.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/core/error.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/schedule/generators.h"
#include "tests/test_device.h"

namespace plumb {
namespace {

constexpr int64_t kWidth = 32, kRows = 64;

// Returns a transformer layer's second half, behind dropout.
std::shared_ptr<StageFunction> block(int stage, Recompute recompute) {
  at::manual_seed(stage);
  const std::string name = std::to_string(stage) + ".";
  auto weight = [](at::IntArrayRef sizes) { return there(at::randn(sizes) * 0.2).requires_grad_(true); };
  auto gain = weight({kWidth}), shift = weight({kWidth}), up = weight({4 * kWidth, kWidth}),
       bias = weight({4 * kWidth}), down = weight({kWidth, 4 * kWidth});
  auto made = std::make_shared<LambdaStage>(
      [=](const Tensors& in) -> Tensors {
        auto x = in[0];
        for (int i = 0; i < 2; i++) {
          auto h = at::linear(at::layer_norm(at::dropout(x, 0.1, true), {kWidth}, gain, shift), up, bias);
          x = x + at::linear(at::gelu(h), down);
        }
        return {x};
      },
      std::vector<NamedTensor>{{name + "gain", gain},
                               {name + "shift", shift},
                               {name + "up", up},
                               {name + "bias", bias},
                               {name + "down", down}});
  made->recompute = recompute;
  return made;
}

struct Ran {
  Tensors values;
  int64_t peak = 0;
  std::vector<RecomputeReport> reports;
};

Ran run(const std::string& table, Recompute recompute, int steps = 2) {
  std::map<int, std::shared_ptr<StageFunction>> stages;
  PipeTable layout = PipeTable::chain(2);
  for (int s : {0, 1}) stages[s] = block(s, recompute);
  PipelineOptions options;
  options.loss = [](const Tensors& out, const Tensors& target) { return at::mse_loss(out[0], target[0]); };
  options.return_outputs = false;
  options.seed = 11;
  Pipeline pipeline(layout, parse_csv(table), stages, {}, options);
  Ran ran;
  at::manual_seed(2);
  const at::Tensor input = randn_there({2 * kRows, kWidth}), target = randn_there({2 * kRows, kWidth});
  for (int step = 0; step < steps; step++) {
    for (auto& [s, stage] : stages) {
      for (auto& p : stage->parameters()) p.tensor.mutable_grad() = at::Tensor();
    }
    LiveBytes bytes;
    ran.values.push_back(pipeline.step({input}, {target}).loss);
    ran.peak = bytes.peak();
  }
  for (auto& [s, stage] : stages) {
    for (auto& p : stage->parameters()) ran.values.push_back(p.tensor.grad());
    ran.reports.push_back(pipeline.recomputed(s));
  }
  return ran;
}

const char* const kWhole = "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n";
const char* const kHalves = "0F0,1F0,0F1,1F1,1I0,0I0,1I1,0I1,1W0,0W0,1W1,0W1\n";

TEST(StageRecompute, GivesTheSameBitsInLessMemory) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  for (const char* table : {kWhole, kHalves}) {
    const Ran kept = run(table, Recompute::None), again = run(table, Recompute::Cheap);
    ASSERT_EQ(kept.values.size(), again.values.size());
    for (size_t i = 0; i < kept.values.size(); i++) EXPECT_TRUE(at::equal(kept.values[i], again.values[i])) << i;
    EXPECT_LT(static_cast<double>(again.peak), 0.8 * static_cast<double>(kept.peak)) << table;
  }
}

TEST(StageRecompute, SaysWhatAMicrobatchDidNotKeep) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  for (const auto& report : run(kWhole, Recompute::Cheap).reports) {
    ASSERT_TRUE(report.by_operator.count("aten::gelu"));
    EXPECT_EQ(report.by_operator.at("aten::gelu").tensors, 2);
    EXPECT_EQ(report.by_operator.at("aten::gelu").bytes, 2 * kRows * 4 * kWidth * 4);
    EXPECT_EQ(report.differing, 0);
  }
  for (const auto& report : run(kWhole, Recompute::None).reports) EXPECT_TRUE(report.by_operator.empty());
}

// Small results are kept, so a stage of small microbatches is left alone; larger ones after them are not.
TEST(StageRecompute, StartsWhereLargerMicrobatchesFollowSmallOnes) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s : {0, 1}) stages[s] = block(s, Recompute::Cheap);
  PipelineOptions options;
  options.loss = [](const Tensors& out, const Tensors& target) { return at::mse_loss(out[0], target[0]); };
  Pipeline pipeline(PipeTable::chain(2), parse_csv(kWhole), stages, {}, options);
  auto tensors_after = [&](int64_t rows) {
    pipeline.step({randn_there({rows, kWidth})}, {randn_there({rows, kWidth})});
    return pipeline.recomputed(0).total().tensors;
  };
  EXPECT_EQ(tensors_after(2), 0);
  EXPECT_EQ(tensors_after(2), 0);
  const int64_t large = tensors_after(2 * kRows);
  EXPECT_GT(large, 0);
  EXPECT_EQ(tensors_after(2 * kRows), large);
}

// How often an operator runs, on this thread or in one of a device's backward.
class Calls {
 public:
  explicit Calls(const std::string& name) {
    current_ = this;
    name_ = name;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&Calls::seen).scopes({at::RecordScope::FUNCTION}));
  }
  ~Calls() { at::removeCallback(handle_); }
  std::atomic<int> count = 0;

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& fn) {
    if (current_->name_ == fn.name()) current_->count++;
    return nullptr;
  }
  static inline Calls* current_ = nullptr;
  std::string name_;
  at::CallbackHandle handle_;
};

TEST(StageRecompute, MakesAProductsInputOnceForBothHalves) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  at::manual_seed(3);
  auto x = randn_there({kRows, kWidth}), up = randn_there({4 * kWidth, kWidth}),
       down = randn_there({kWidth, 4 * kWidth});
  up.requires_grad_(true);
  down.requires_grad_(true);
  auto forward = [&](const at::Tensor& in) { return at::linear(at::gelu(at::linear(in, up)), down); };
  InputBoundary boundary({x}, {true});
  Tensors outputs;
  {
    CheapRecompute recompute;
    outputs = {forward(boundary.inputs()[0])};
    recompute.finish();
    ASSERT_EQ(recompute.report().total().tensors, 1);
  }
  const Tensors grads{at::ones_like(outputs[0])};
  InputHalf half;
  {
    const Calls calls("aten::gelu");
    half = stage_backward_input(outputs, grads, boundary);
    EXPECT_EQ(calls.count, 0) << "the gradient of the input does not need it";
  }
  {
    const Calls calls("aten::gelu");
    stage_backward_weight(half.deferred);
    EXPECT_EQ(calls.count, test_device().is_privateuseone() ? 2 : 1) << "the test device's is made of the CPU's";
  }
  x.requires_grad_(true);
  const auto plain = torch::autograd::grad({forward(x)}, {x, up, down}, grads);
  EXPECT_TRUE(at::equal(half.input_grads[0], plain[0]));
  EXPECT_TRUE(at::equal(up.grad(), plain[1]));
  EXPECT_TRUE(at::equal(down.grad(), plain[2]));
}

TEST(StageRecompute, AReportIsOfAStageOfThisRank) {
  std::map<int, std::shared_ptr<StageFunction>> stages{{0, block(0, Recompute::Cheap)}};
  PipelineOptions options;
  options.loss = [](const Tensors& out, const Tensors&) { return out[0].sum(); };
  const Pipeline pipeline(PipeTable::chain(1), parse_csv("0F0,0B0\n"), stages, {}, options);
  EXPECT_TRUE(pipeline.recomputed(0).by_operator.empty()) << "nothing ran";
  EXPECT_THROW(pipeline.recomputed(1), Error);
}

// Returns how many forwards of every stage keep everything because they go back at once while others wait.
std::vector<int> kept_whole(const std::string& name, int rank) {
  const Schedule schedule = compute_only(make_schedule(name, 2, 8));
  const int stages = schedule.num_stages();
  std::vector<int> kept(static_cast<size_t>(stages));
  for (const RunAction& run : plan_run(schedule, connect_stages(PipeTable::chain(stages)), rank, {}).actions)
    kept[static_cast<size_t>(run.action.stage)] += run.backward_is_next;
  return kept;
}

TEST(StageRecompute, LeavesAMicrobatchWholeThatGoesBackAtOnceWhileOthersWait) {
  EXPECT_EQ(kept_whole("ZBVZeroBubble", 0), (std::vector<int>{0, 0, 0, 8}));
  EXPECT_EQ(kept_whole("ZBVZeroBubble", 1), (std::vector<int>{0, 0, 0, 0}));
  // The only one there is what its rank's memory is made of.
  EXPECT_EQ(kept_whole("1F1B", 1), (std::vector<int>{0, 0}));
  EXPECT_EQ(kept_whole("1F1B", 0), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace plumb
