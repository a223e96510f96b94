// Plans that cannot be had, and the sentence about one: it says what the plan gains, and nothing where there is nothing
// to gain.
#include "plumb/training/plan/plan_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::Not;

ScheduleChoice choice(const std::string& name, int ranks, double seconds) {
  ScheduleChoice made{.name = name, .schedule = make_schedule("1F1B", ranks, 4)};
  made.simulation.makespan = seconds;
  made.simulation.busy.assign(static_cast<size_t>(ranks), seconds * 0.97);
  return made;
}

PlannedModel planned(int ranks, double joint, double bound) {
  PlannedModel made;
  made.choices = {choice(kJoint, ranks, joint), choice("1F1B", ranks, 0.01)};
  made.bound = bound;
  return made;
}

std::shared_ptr<GraphModule> chain(int length) {
  std::string text = "graph { %x: f32[64] = placeholder \"x\" %v0: f32[64] = aten::neg(%x)";
  for (int i = 1; i < length; ++i) text += c10::str(" %v", i, ": f32[64] = aten::neg(%v", i - 1, ")");
  return std::make_shared<GraphModule>(parse_graph(text + c10::str(" output(%v", length - 1, ") }")), State(),
                                       TreeSpec::positional_inputs(1), TreeSpec::tuple({TreeSpec::leaf()}));
}

TEST(PlanModel, SaysWhyNothingIsFoundForMoreRanksThanPieces) {
  const PlannedModel made = plan_model(
      *chain(320), {},
      {.ranks = 300, .microbatches = 1, .stages_per_rank = {1}, .names = {"GPipe", kJoint}, .estimate = true});
  ASSERT_EQ(made.choices.size(), 2u);
  EXPECT_EQ(made.choices[0].problem, "");
  EXPECT_THAT(made.choices[1].problem, HasSubstr("257 pieces has no schedule for 300 ranks"));
}

TEST(PlanModel, SaysWhyAChoiceIsNotThere) {
  PlannedModel made = planned(2, 0.008, 0.006);
  made.choices.push_back({.name = "DualPipe", .problem = "the stages are odd", .fits = false});
  const auto refused = [&](const std::string& name) {
    try {
      made.choose(name);
    } catch (const Error& e) {
      return c10::str(to_string(e.kind()), ": ", e.message(), "; ", e.remedy());
    }
    return std::string("chosen");
  };
  EXPECT_EQ(made.choose("").name, kJoint);
  EXPECT_EQ(made.choose("1F1B").name, "1F1B");
  EXPECT_THAT(refused("DualPipe"), HasSubstr("DualPipe cannot be had: the stages are odd"));
  EXPECT_THAT(refused("GPipe"),
              HasSubstr("UnknownName: no schedule named 'GPipe' was compared; Joint, 1F1B, DualPipe"));
  for (ScheduleChoice& c : made.choices) c.fits = false;
  EXPECT_THAT(refused(""), HasSubstr("no schedule keeps the memory limit"));
}

TEST(Conclusion, NamesWhatAPlanGains) {
  const PlannedModel made = planned(2, 0.008, 0.006);
  EXPECT_EQ(conclusion(made, made.choices[0]),
            "Joint: 8 ms a step, 1.25 x as fast as 1F1B; all work, evenly on all ranks, would take 75.0% of that; rank "
            "0 works 97.0% of it");
}

TEST(Conclusion, SaysWhatASharedCoreCosts) {
  PlannedModel made = planned(4, 0.008, 0.006);
  made.cores = 4;
  EXPECT_THAT(conclusion(made, made.choices[0]), Not(HasSubstr("cores alone")));
  made.cores = 2;
  EXPECT_THAT(conclusion(made, made.choices[0]),
              HasSubstr("; trained on this machine's 2 cores alone: at least 15.52 ms"));
}

TEST(Conclusion, ClaimsNoGainOnOneRank) {
  const PlannedModel made = planned(1, 0.008, 0.00799);
  EXPECT_EQ(conclusion(made, made.choices[0]), "Joint: 8 ms a step");
}

TEST(Conclusion, LeavesOutABoundThatAStepOfOtherCostsIsBelow) {
  const PlannedModel made = planned(2, 0.01, 0.0103);
  EXPECT_THAT(conclusion(made, made.choices[1]), Not(HasSubstr("all work")));
}

}  // namespace
}  // namespace plumb
