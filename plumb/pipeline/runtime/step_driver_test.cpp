#include "plumb/pipeline/runtime/step_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/models_testing.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Does by the driver what the engine would have done.
void perform(const Action& action, StepDriver& driver) {
  for (const Action& part : {action.first_part(), action.second_part()}) {
    if (part.kind == ActionKind::Forward) driver.forward(part.stage, part.microbatch);
    if (part.kind == ActionKind::FullBackward || part.kind == ActionKind::BackwardInput ||
        part.kind == ActionKind::BackwardWeight) {
      driver.backward(part.kind, part.stage, part.microbatch);
    }
  }
}

// The parts of a pair at once.
void perform_together(const Action& action, StepDriver& driver) {
  std::thread backward([&] { perform(action.second_part(), driver); });
  perform(action.first_part(), driver);
  backward.join();
}

struct Done {
  Tensors losses, gradients;
  StepResult last;
};

Done train(const std::string& model_name, const std::string& schedule_name, ActionHooks hooks, int stages = 2) {
  TestModel model = test_model(model_name, stages);
  const auto schedule = make_schedule(schedule_name, 1, 4, stages);
  PipelineOptions options;
  options.loss = model.loss;
  options.seed = model.seed;
  options.record_timeline = true;
  options.hooks = std::move(hooks);
  std::map<int, std::shared_ptr<StageFunction>> local;
  for (int s = 0; s < stages; s++) local[s] = model.make_stage(s);
  Pipeline pipeline(model.layout, schedule, local, {}, options);
  Done done;
  for (int step = 0; step < 2; step++) {
    auto [inputs, targets] = model.batch(step);
    done.last = pipeline.step(inputs, targets);
    for (const auto& loss : done.last.losses) done.losses.push_back(loss);
  }
  for (const auto& [s, stage] : local) {
    for (const auto& p : stage->parameters()) done.gradients.push_back(p.tensor.grad());
  }
  return done;
}

void expect_equal(const Tensors& ours, const Tensors& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); i++) {
    ASSERT_EQ(ours[i].defined(), theirs[i].defined());
    EXPECT_TRUE(!ours[i].defined() || at::equal(ours[i], theirs[i])) << i;
  }
}

TEST(Hooks, ThatUseTheDriverChangeNoBit) {
  for (const char* model : {"mlp", "ragged", "skip", "tied", "norm", "half", "cut"}) {
    for (const char* schedule : {"LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"}) {
      int called = 0;
      ActionHooks hooks;
      for (const auto kind :
           {ActionKind::Forward, ActionKind::FullBackward, ActionKind::BackwardInput, ActionKind::BackwardWeight}) {
        hooks[{kind}] = [&called](const Action& action, StepDriver& driver) {
          ++called;
          perform(action, driver);
        };
      }
      const Done plain = train(model, schedule, {}), hooked = train(model, schedule, hooks);
      expect_equal(hooked.losses, plain.losses);
      expect_equal(hooked.gradients, plain.gradients);
      EXPECT_EQ(called, 2 * static_cast<int>(plain.last.timeline.size()));
      EXPECT_EQ(hooked.last.timeline.size(), plain.last.timeline.size());
    }
  }
}

TEST(Hooks, OfAStageGoBeforeThoseOfEveryStage) {
  std::vector<std::string> seen;
  auto note = [&](const std::string& who) {
    return [&seen, who](const Action& action, StepDriver& driver) {
      seen.push_back(who + " " + to_string(action));
      perform(action, driver);
    };
  };
  train("mlp", "LoopedBFS", {{{ActionKind::Forward, 1}, note("own")}, {{ActionKind::Forward}, note("any")}});
  seen.resize(seen.size() / 2);  // the first step's
  EXPECT_THAT(seen,
              ElementsAre("any 0F0", "any 0F1", "any 0F2", "any 0F3", "own 1F0", "own 1F1", "own 1F2", "own 1F3"));
}

TEST(Hooks, RunAPairAsOneActionFromTwoThreads) {
  const Done plain = train("mlp", "DualPipeV", {});
  int pairs = 0;
  const Done hooked = train("mlp", "DualPipeV", {{{ActionKind::Overlap}, [&](const Action& action, StepDriver& driver) {
                                                    ++pairs;
                                                    perform_together(action, driver);
                                                  }}});
  EXPECT_GT(pairs, 0);
  expect_equal(hooked.losses, plain.losses);
  expect_equal(hooked.gradients, plain.gradients);
  int recorded = 0;
  for (const auto& event : hooked.last.timeline) recorded += event.action.kind == ActionKind::Overlap;
  EXPECT_EQ(recorded, pairs / 2);
}

TEST(Hooks, OfReduceGradSeeCompleteGradientsAndDivideThemThemselves) {
  for (const char* model : {"mlp", "tied"}) {
    std::vector<int> order;
    const Done plain = train(model, "LoopedBFS", {});
    const Done hooked =
        train(model, "LoopedBFS",
              {{{ActionKind::ReduceGrad}, [&](const Action& action, StepDriver&) { order.push_back(action.stage); }}});
    // Hooks see tied parameters at the end of a step, others as soon as a stage's gradients are complete.
    EXPECT_THAT(order, std::string(model) == "tied" ? testing::Matcher<std::vector<int>>(ElementsAre(0, 1, 0, 1))
                                                    : testing::Matcher<std::vector<int>>(ElementsAre(1, 0, 1, 0)));
    for (size_t i = 0; i < plain.gradients.size(); i++)
      EXPECT_TRUE(at::equal(hooked.gradients[i], plain.gradients[i] * 4));
  }
}

TEST(Hooks, ThatLeaveTheirActionOutAreNamed) {
  EXPECT_THAT(message_of([] { train("mlp", "LoopedBFS", {{{ActionKind::Forward, 1}, [](auto&, auto&) {}}}); }),
              HasSubstr("rank 0 at 1F0: the function in the place of 1F0 left out the forward of its stage"));
  EXPECT_THAT(message_of([] { train("mlp", "LoopedBFS", {{{ActionKind::FullBackward}, [](auto&, auto&) {}}}); }),
              HasSubstr("left out the backward of its stage"));
  EXPECT_THAT(
      message_of([] { train("mlp", "InterleavedZeroBubble", {{{ActionKind::BackwardWeight}, [](auto&, auto&) {}}}); }),
      HasSubstr("left out the weight half"));
  auto twice = [](const Action& action, StepDriver& driver) {
    perform(action, driver);
    perform(action, driver);
  };
  EXPECT_THAT(message_of([&] { train("mlp", "LoopedBFS", {{{ActionKind::Forward}, twice}}); }),
              HasSubstr("microbatch 0 in stage 0 goes forward twice"));
  EXPECT_THAT(message_of([&] { train("mlp", "LoopedBFS", {{{ActionKind::FullBackward}, twice}}); }),
              HasSubstr("goes back in stage 1 without a forward before it"));
}

TEST(Hooks, WithoutAFunctionOrForAStageThatIsNotThereAreNamedBeforeTheFirstStep) {
  EXPECT_THAT(message_of([] { train("mlp", "LoopedBFS", {{{ActionKind::FullBackward}, ActionHook()}}); }),
              HasSubstr("the hook of B has no function"));
  for (const int stage : {2, -2}) {
    EXPECT_THAT(message_of([&] { train("mlp", "LoopedBFS", {{{ActionKind::Forward, stage}, perform}}); }),
                HasSubstr(str("a hook of F is for stage ", stage, ", the model has 2")));
  }
}

TEST(Hooks, AreToldApartFromTheDriverOfNoStep) {
  TestModel model = test_model("mlp", 1);
  Pipeline pipeline(model.layout, make_schedule("GPipe", 1, 2, 1), {{0, model.make_stage(0)}}, {}, {model.loss});
  auto driver = pipeline.driver();
  EXPECT_THAT(message_of([&] { driver.forward(0, 0); }), HasSubstr("outside of a step"));
  EXPECT_THAT(message_of([&] { driver.forward(3, 0); }), HasSubstr("stage 3 is not on this rank"));
}

TEST(StepDriver, RefusesAStageWithoutAFunction) {
  EXPECT_THAT(message_of([] { StepDriver(test_model("mlp", 1).layout, 0, nullptr); }), HasSubstr("a null pointer"));
}

TEST(StepDriver, RunsAStageByHand) {
  for (const bool halves : {false, true}) {
    TestModel model = test_model("skip", 2);
    std::shared_ptr<TestStage> own[2] = {model.make_stage(0), model.make_stage(1)};
    std::shared_ptr<TestStage> reference[2] = {model.make_stage(0), model.make_stage(1)};
    auto [inputs, targets] = model.batch(0);
    struct Kept : StageFunction {
      explicit Kept(std::shared_ptr<StageFunction> f) : function(std::move(f)) {}
      Tensors forward(const Tensors& in) override { return outputs = function->forward(in); }
      std::shared_ptr<StageFunction> function;
      Tensors outputs;
    };
    auto first = std::make_shared<Kept>(own[0]), second = std::make_shared<Kept>(own[1]);
    StepDriver driver0(model.layout, 0, first), driver1(model.layout, 1, second);
    const auto back = halves ? ActionKind::BackwardInput : ActionKind::FullBackward;
    for (int m = 0; m < 2; m++) {
      driver0.take_model_inputs(0, m, inputs);
      driver0.forward(0, m);
      EXPECT_THAT(message_of([&] { driver1.forward(1, m); }), HasSubstr("before the values of stage 0 arrived"));
      driver1.take_outputs(1, m, 0, first->outputs);
      driver1.forward(1, m);
      EXPECT_THAT(message_of([&] { driver0.backward(back, 0, m); }), HasSubstr("before the gradients of stage 1"));
      driver1.backward(back, 1, m, model.loss(second->outputs, targets));
      driver0.take_gradients(0, m, 1, driver1.input_gradients(1, m, 0));
      driver0.backward(back, 0, m);
      if (halves) {
        driver1.backward(ActionKind::BackwardWeight, 1, m);
        driver0.backward(ActionKind::BackwardWeight, 0, m);
      }
      EXPECT_THAT(message_of([&] { driver0.backward(ActionKind::BackwardWeight, 0, m); }),
                  HasSubstr("without the input half"));
      model.loss(reference[1]->forward(reference[0]->forward(inputs)), targets).backward();
    }
    for (int s = 0; s < 2; s++) {
      for (size_t i = 0; i < own[s]->parameters().size(); i++)
        EXPECT_TRUE(at::equal(own[s]->parameters()[i].tensor.grad(), reference[s]->parameters()[i].tensor.grad()));
    }
    EXPECT_THAT(message_of([&] { driver0.forward(1, 0); }), HasSubstr("stage 1 is not on this rank"));
    EXPECT_THAT(message_of([&] { driver0.forward(0, -1); }), HasSubstr("no microbatch -1"));
    EXPECT_THAT(message_of([&] { driver1.take_outputs(1, 3, 0, {}); }), HasSubstr("0 values were given"));
  }
}

}  // namespace
}  // namespace plumb
