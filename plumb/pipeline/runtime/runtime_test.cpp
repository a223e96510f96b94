#include "plumb/pipeline/runtime/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

std::map<int, std::shared_ptr<StageFunction>> all_stages(const TestModel& model) {
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s = 0; s < model.layout.num_stages(); s++) stages[s] = model.make_stage(s);
  return stages;
}

Pipeline one_process(const TestModel& model, PipelineOptions options, int microbatches = 4) {
  if (!options.loss) options.loss = model.loss;
  return Pipeline(model.layout, make_schedule("LoopedBFS", 1, microbatches, model.layout.num_stages()),
                  all_stages(model), {}, options);
}

TEST(Pipeline, AddsToGradientsThatWereThere) {
  for (const char* name : {"mlp", "tied"}) {
    auto model = test_model(name, 2);
    auto stages = all_stages(model);
    PipelineOptions options;
    options.loss = model.loss;
    Pipeline pipeline(model.layout, make_schedule("LoopedBFS", 1, 4, 2), stages, {}, options);
    auto [inputs, targets] = model.batch(0);
    pipeline.step(inputs, targets);
    Tensors once;
    for (auto& [s, stage] : stages) {
      for (auto& p : stage->parameters()) once.push_back(p.tensor.grad().clone());
    }
    pipeline.step(inputs, targets);
    size_t i = 0;
    for (auto& [s, stage] : stages) {
      for (auto& p : stage->parameters()) {
        EXPECT_TRUE(at::equal(p.tensor.grad(), once[i] + once[i])) << p.name;
        i++;
      }
    }
  }
}

TEST(Pipeline, SumsGradientsWhereScalingIsOff) {
  auto model = test_model("mlp", 2);
  auto scaled = all_stages(model), summed = all_stages(model);
  auto [inputs, targets] = model.batch(0);
  for (bool scale : {true, false}) {
    PipelineOptions options;
    options.loss = model.loss;
    options.scale_grads = scale;
    Pipeline(model.layout, make_schedule("LoopedBFS", 1, 4, 2), scale ? scaled : summed, {}, options)
        .step(inputs, targets);
  }
  const auto a = scaled[0]->parameters()[0].tensor.grad(), b = summed[0]->parameters()[0].tensor.grad();
  EXPECT_TRUE(at::equal(a * 4, b));
}

TEST(Pipeline, EvaluatesWithoutGradients) {
  auto model = test_model("mlp", 2);
  auto stages = all_stages(model);
  PipelineOptions options;
  options.loss = model.loss;
  Pipeline pipeline(model.layout, make_schedule("InterleavedZeroBubble", 1, 4, 2), stages, {}, options);
  auto [inputs, targets] = model.batch(0);
  auto result = pipeline.eval(inputs, targets);
  auto expected = stages[1]->forward(stages[0]->forward(inputs))[0].detach();
  EXPECT_TRUE(at::allclose(result.outputs.at(0), expected, 1e-6, 1e-7));
  EXPECT_EQ(result.losses.size(), 4u);
  EXPECT_TRUE(at::allclose(result.loss, at::mse_loss(expected, targets[0])));
  EXPECT_FALSE(stages[0]->parameters()[0].tensor.grad().defined());
  EXPECT_FALSE(result.outputs[0].requires_grad());
  EXPECT_TRUE(pipeline.eval(inputs).losses.empty());
  EXPECT_EQ(pipeline.step(inputs, targets).losses.size(), 4u);
}

TEST(Pipeline, LeavesFrozenStagesWithoutGradient) {
  auto model = test_model("mlp", 3);
  auto stages = all_stages(model);
  for (auto& p : stages[1]->parameters()) p.tensor.requires_grad_(false);
  for (auto& p : stages[0]->parameters()) p.tensor.requires_grad_(false);
  PipelineOptions options;
  options.loss = model.loss;
  for (const char* schedule : {"LoopedBFS", "InterleavedZeroBubble"}) {
    Pipeline pipeline(model.layout, make_schedule(schedule, 1, 4, 3), stages, {}, options);
    auto [inputs, targets] = model.batch(0);
    pipeline.step(inputs, targets);
    EXPECT_FALSE(stages[0]->parameters()[0].tensor.grad().defined());
    EXPECT_FALSE(stages[1]->parameters()[0].tensor.grad().defined());
    EXPECT_TRUE(stages[2]->parameters()[0].tensor.grad().defined());
  }
}

TEST(Pipeline, RecordsItsTimeLine) {
  auto model = test_model("mlp", 2);
  PipelineOptions options;
  options.record_timeline = true;
  auto pipeline = one_process(model, options);
  auto [inputs, targets] = model.batch(0);
  auto result = pipeline.step(inputs, targets);
  ASSERT_EQ(result.timeline.size(), pipeline.schedule().rows[0].size());
  for (size_t i = 0; i < result.timeline.size(); i++) {
    const auto& e = result.timeline[i];
    EXPECT_EQ(to_string(e.action), to_string(pipeline.schedule().rows[0][i]));
    EXPECT_LE(e.waiting, e.start);
    EXPECT_LE(e.start, e.end);
  }
  auto gathered = pipeline.gather_timeline();
  EXPECT_EQ(gathered.size(), result.timeline.size());
  // On the clock of the ranks, so that steps stand behind each other.
  EXPECT_NEAR(gathered[0].waiting, result.timeline[0].waiting, 1e-6);
  EXPECT_EQ(to_text(parse_timeline(to_text(gathered))), to_text(gathered));
  double busy = 0;
  for (const auto& e : gathered) busy += e.end - e.start;
  EXPECT_NEAR(measured_bubble(gathered), 1 - busy / (gathered.back().end - gathered[0].start), 1e-9);
}

TEST(Pipeline, NamesStageMicrobatchAndEntryOfABadNumber) {
  auto model = test_model("mlp", 2);
  PipelineOptions options;
  options.check_numerics = true;
  auto pipeline = one_process(model, options);
  auto [inputs, targets] = model.batch(0);
  EXPECT_EQ(pipeline.step(inputs, targets).losses.size(), 4u);
  inputs[0] = inputs[0].clone();
  inputs[0][5][0] = std::nan("");
  EXPECT_THAT(message_of([&] { pipeline.step(inputs, targets); }),
              testing::HasSubstr("output 0 of stage 0, microbatch 2: entry [1, 0] is nan"));
}

TEST(Pipeline, SaysWhatIsWrongWithItsParts) {
  auto model = test_model("mlp", 2);
  PipelineOptions options;
  options.loss = model.loss;
  auto stages = all_stages(model);
  auto make = [&](const char* schedule, int ranks, int per_rank, auto given) {
    return message_of([&] { Pipeline(model.layout, make_schedule(schedule, ranks, 4, per_rank), given, {}, options); });
  };
  EXPECT_THAT(make("1F1B", 2, 1, stages), testing::HasSubstr("is for 2 ranks, the group has 1"));
  EXPECT_THAT(make("LoopedBFS", 1, 3, stages), testing::HasSubstr("has 3 stages, the model 2"));
  auto missing = stages;
  missing.erase(1);
  EXPECT_THAT(make("LoopedBFS", 1, 2, missing), testing::HasSubstr("runs stage 1"));
  auto more = stages;
  more[5] = stages[0];
  EXPECT_THAT(make("LoopedBFS", 1, 2, more), testing::HasSubstr("was given 3 stages"));
  auto broken = make_schedule("LoopedBFS", 1, 4, 2);
  broken.rows[0].pop_back();
  EXPECT_THAT(message_of([&] { Pipeline(model.layout, broken, stages, {}, options); }),
              testing::HasSubstr("missing on rank 0"));
}

TEST(Pipeline, SaysWhatIsWrongWithABatch) {
  auto model = test_model("mlp", 2);
  PipelineOptions options;
  options.loss = [&](const Tensors& out, const Tensors& target) { return model.loss(out, {target.at(0)}); };
  auto pipeline = one_process(model, options);
  auto [inputs, targets] = model.batch(0);
  EXPECT_THAT(message_of([&] { pipeline.step({}, targets); }), testing::HasSubstr("was not given it"));
  EXPECT_THAT(message_of([&] { pipeline.step({inputs[0].narrow(0, 0, 3)}, targets); }),
              testing::HasSubstr("too few for 4"));
  EXPECT_THAT(message_of([&] { pipeline.step(inputs, {}); }), testing::HasSubstr("rank 0 at 1F0"));
  EXPECT_THAT(message_of([&] { pipeline.step({inputs[0], inputs[0]}, targets); }),
              testing::HasSubstr("rank 0 was given 2 inputs, and the model takes 1"));
  EXPECT_THAT(message_of([&] { pipeline.eval({inputs[0], inputs[0]}); }), testing::HasSubstr("given 2 inputs"));
  EXPECT_THAT(message_of([&] { pipeline.step_microbatches({}, {}, {4, -4, 4, 4}); }), testing::HasSubstr("negative"));
  for (const int64_t of_all : {-1, 15}) {
    EXPECT_THAT(message_of([&] { pipeline.step_microbatches({}, {}, {4, 4, 4, 4}, of_all); }),
                testing::HasSubstr(str("together have ", of_all, " rows, this one alone 16")));
  }
  EXPECT_EQ(pipeline.step(inputs, targets).losses.size(), 4u);  // none of it left a trace
  EXPECT_THROW(pipeline.step(inputs, {}), Error);
  EXPECT_FALSE(pipeline.gather_loss().defined());
}

TEST(Pipeline, ThatWasMovedFromSaysSo) {
  auto model = test_model("mlp", 2);
  PipelineOptions options;
  options.loss = model.loss;
  auto pipeline = one_process(model, options);
  auto other = std::move(pipeline);
  auto [inputs, targets] = model.batch(0);
  EXPECT_EQ(other.step(inputs, targets).losses.size(), 4u);
  EXPECT_THAT(message_of([&] { pipeline.step(inputs, targets); }),  // NOLINT(bugprone-use-after-move)
              testing::HasSubstr("was moved into another one"));
}

TEST(Pipeline, GivesGradientsOfInputsThatAskForThem) {
  for (const char* name : {"LoopedBFS", "InterleavedZeroBubble"}) {
    auto model = test_model("skip", 2);
    PipelineOptions options;
    options.loss = model.loss;
    std::map<int, std::shared_ptr<StageFunction>> stages{{0, model.make_stage(0)}, {1, model.make_stage(1)}};
    Pipeline pipeline(model.layout, make_schedule(name, 1, 4, 2), stages, {}, options);
    auto [inputs, targets] = model.batch(0);
    auto leaf = inputs[0].clone().requires_grad_(true);
    auto result = pipeline.step({leaf}, targets);
    ASSERT_EQ(result.input_grads.size(), 4u);
    auto first = stages[0]->forward({leaf});
    auto out = stages[1]->forward({first[0], first[1], first[2]});
    at::mse_loss(out[0], targets[0]).backward();
    std::vector<at::Tensor> parts;
    for (auto& grads : result.input_grads) parts.push_back(grads.at(0));
    // A product of a microbatch's rows may sum in another order than one of all rows.
    const at::Tensor all = at::cat(parts), apart = (all - leaf.grad()).abs().max();
    EXPECT_LT(apart.item<float>(), 1e-5f * leaf.grad().abs().max().item<float>());
    EXPECT_TRUE(pipeline.step(inputs, targets).input_grads.empty()) << "not asked for";
  }
}

TEST(Pipeline, NamesAStageThatReturnsTooFewValues) {
  auto model = test_model("mlp", 2);
  model.layout.stages[0].outputs.resize(2);
  auto pipeline = one_process(model, {});
  auto [inputs, targets] = model.batch(0);
  EXPECT_THAT(message_of([&] { pipeline.step(inputs, targets); }),
              testing::HasSubstr("stage 0 returned 1 values, its layout says 2"));
}

TEST(Pipeline, NamesAParameterOrAFunctionThatIsMissingBeforeTheFirstStep) {
  auto model = test_model("mlp", 2);
  const Schedule schedule = make_schedule("LoopedBFS", 1, 4, 2);
  auto stages = all_stages(model);
  PipelineOptions options;
  options.loss = model.loss;
  options.output_merges = {{}, OutputMerge::custom(nullptr)};
  EXPECT_THAT(message_of([&] { Pipeline(model.layout, schedule, stages, {}, options); }),
              testing::HasSubstr("OutputMerge::custom() of output 1 has no function"));
  options.output_merges.clear();
  stages[1] = std::make_shared<LambdaStage>([](const Tensors& in) { return in; },
                                            std::vector<NamedTensor>{{"head.weight", at::Tensor()}});
  EXPECT_THAT(message_of([&] { Pipeline(model.layout, schedule, stages, {}, options); }),
              testing::HasSubstr("parameter 'head.weight' of stage 1 is an undefined tensor"));
  EXPECT_FALSE(stages[1]->device().has_value());
  EXPECT_THAT(message_of([] { LambdaStage(nullptr, {}); }), testing::HasSubstr("the function is empty"));
  EXPECT_THAT(message_of([&] { GraphStage(nullptr, model.layout, 0); }), testing::HasSubstr("stage 0 has no graph"));
  EXPECT_THAT(message_of([&] { GraphStage(std::make_shared<GraphModule>(), model.layout, 2); }),
              testing::HasSubstr("has no stage 2, it has 2"));
}

TEST(Pipeline, RefusesAWriteThatAnotherStageWouldSee) {
  auto model = test_model("skip", 3);
  auto stages = all_stages(model);
  auto inner = stages[1];
  stages[1] = std::make_shared<LambdaStage>(
      [inner](const Tensors& in) {
        auto out = inner->forward(in);
        in[1].mul_(2);
        return out;
      },
      inner->parameters());
  PipelineOptions options;
  options.loss = model.loss;
  Pipeline pipeline(model.layout, make_schedule("LoopedBFS", 1, 4, 3), stages, {}, options);
  auto [inputs, targets] = model.batch(0);
  EXPECT_THAT(message_of([&] { pipeline.step(inputs, targets); }),
              testing::HasSubstr("stage 1 writes in place to output 1 of stage 0"));
}

TEST(Pipeline, RefusesTiedWeightsThatDiffer) {
  auto model = test_model("tied", 2);
  auto stages = all_stages(model);
  at::NoGradGuard no_grad;
  stages[1]->parameters()[0].tensor[0][0] += 1;
  PipelineOptions options;
  options.loss = model.loss;
  EXPECT_THAT(message_of([&] { Pipeline(model.layout, make_schedule("LoopedBFS", 1, 4, 2), stages, {}, options); }),
              testing::HasSubstr("hold different values"));
  model.layout.replicated[0][1] = "haed.weight";
  EXPECT_THAT(message_of([&] { Pipeline(model.layout, make_schedule("LoopedBFS", 1, 4, 2), stages, {}, options); }),
              testing::HasSubstr("'haed.weight' does not exist in stage 1"));
}

TEST(Pipeline, TiesOneTensorInTwoStages) {
  auto w = test_weight(3, {6, 6});
  auto stage = [&] {
    return std::make_shared<LambdaStage>([w](const Tensors& in) { return Tensors{at::tanh(at::linear(in[0], w))}; },
                                         std::vector<NamedTensor>{{"w", w}});
  };
  auto model = test_model("mlp", 2);
  PipelineOptions options;
  options.loss = model.loss;
  Pipeline pipeline(model.layout, make_schedule("LoopedBFS", 1, 1, 2), {{0, stage()}, {1, stage()}}, {}, options);
  auto [inputs, targets] = model.batch(0);
  pipeline.step(inputs, targets);
  auto found = w.grad().clone();
  w.mutable_grad() = at::Tensor();
  model.loss({at::tanh(at::linear(at::tanh(at::linear(inputs[0], w)), w))}, targets).backward();
  EXPECT_TRUE(at::equal(found, w.grad()));
}

// Has inputs of its own by microbatch, and returns as many values as the microbatch's number.
struct GrowingStage : StageFunction {
  explicit GrowingStage(int s) : stage(s), weight(test_weight(s, {4, 4})) {}
  Tensors forward(const Tensors&) override { throw std::logic_error("not called by the runtime"); }
  Tensors run(const Tensors& inputs, const Microbatch& which) override {
    const int microbatch = which.index;
    if (stage == 0) {
      Tensors out;
      for (int i = 0; i <= microbatch; i++) out.push_back(at::linear(test_data(10 * microbatch + i, {2, 4}), weight));
      out.emplace_back();
      return out;
    }
    EXPECT_EQ(inputs.size(), microbatch + 2u);
    EXPECT_FALSE(inputs.back().defined());
    auto sum = zeros_there({2, 4});
    for (size_t i = 0; i + 1 < inputs.size(); i++) sum = sum + at::linear(inputs[i], weight).tanh();
    return {sum.square().mean()};
  }
  std::vector<NamedTensor> parameters() const override { return {{"w" + std::to_string(stage), weight}}; }
  int stage;
  at::Tensor weight;
};

TEST(Pipeline, ADynamicChainSendsWhateverStagesReturn) {
  for (const char* name : {"LoopedBFS", "ZBVZeroBubble", "InterleavedZeroBubble"}) {
    const auto schedule = make_schedule(name, 1, 3, 2);
    std::map<int, std::shared_ptr<StageFunction>> stages;
    for (int s : {0, 1}) stages[s] = std::make_shared<GrowingStage>(s);
    PipelineOptions options;
    options.scale_grads = false;
    Pipeline pipeline(PipeTable::dynamic_chain(2), schedule, stages, {}, options);
    auto losses = pipeline.step_microbatches({}).losses;
    GrowingStage first(0), second(1);
    for (int m = 0; m < 3; m++) {
      auto loss = second.run(first.run({}, {m}), {m})[0];
      EXPECT_TRUE(at::equal(loss, losses[m]));
      loss.backward();
    }
    EXPECT_TRUE(at::equal(stages[0]->parameters()[0].tensor.grad(), first.weight.grad()));
    EXPECT_TRUE(at::equal(stages[1]->parameters()[0].tensor.grad(), second.weight.grad()));
    EXPECT_TRUE(pipeline.eval_microbatches({}).losses.empty());
  }
}

TEST(Pipeline, AStageMayDoPartOfItsWeightGradientsItself) {
  struct OwnWork : GrowingStage {
    using GrowingStage::GrowingStage;
    bool has_own_weight_work() const override { return true; }
    std::function<void()> own_weight_work() override {
      log += "I";
      return [this] { log += "W"; };
    }
    std::string log;
  };
  auto own = std::make_shared<OwnWork>(0);
  auto plain = std::make_shared<GrowingStage>(1);
  Schedule schedule = parse_csv("0F0,1F0,1B0,0I0,0F1,1F1,1B1,0I1,0W0,0W1\n");
  Pipeline pipeline(PipeTable::dynamic_chain(2), schedule, {{0, own}, {1, plain}});
  pipeline.step_microbatches({});
  EXPECT_EQ(own->log, "IIWW");
  EXPECT_TRUE(own->weight.grad().defined());
}

}  // namespace
}  // namespace plumb
