// The sentence about a plan: it says what the plan gains, and nothing where there is nothing to gain.
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

TEST(Conclusion, NamesWhatAPlanGains) {
  const PlannedModel made = planned(2, 0.008, 0.006);
  EXPECT_EQ(conclusion(made, made.choices[0]),
            "Joint: 8 ms a step, 1.25 x as fast as 1F1B; all work, evenly on all ranks, would take 75.0% of that; rank "
            "0 works 97.0% of it");
}

TEST(Conclusion, ClaimsNoGainOnOneRank) {
  const PlannedModel made = planned(1, 0.01, 0.00999);
  EXPECT_EQ(conclusion(made, made.choices[0]), "Joint: 10 ms a step, as fast as 1F1B");
}

TEST(Conclusion, LeavesOutABoundThatAStepOfOtherCostsIsBelow) {
  const PlannedModel made = planned(2, 0.01, 0.0103);
  EXPECT_THAT(conclusion(made, made.choices[1]), Not(HasSubstr("all work")));
}

}  // namespace
}  // namespace plumb
