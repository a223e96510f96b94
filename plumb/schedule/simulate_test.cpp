#include "plumb/schedule/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/lower.h"

namespace plumb {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;

TEST(Simulate, GivesTheTimeOfEveryAction) {
  Simulation simulation = simulate_schedule(one_f_one_b_schedule(2, 2));
  EXPECT_THAT(simulation.spans[0], ElementsAre(Span{0, 1}, Span{1, 2}, Span{4, 6}, Span{7, 9}));
  EXPECT_THAT(simulation.spans[1], ElementsAre(Span{1, 2}, Span{2, 4}, Span{4, 5}, Span{5, 7}));
  EXPECT_EQ(simulation.makespan, 9);
  EXPECT_THAT(simulation.busy, ElementsAre(6, 6));
  EXPECT_THAT(simulation.first, ElementsAre(0, 1));
  EXPECT_THAT(simulation.last, ElementsAre(9, 7));
  EXPECT_THAT(simulation.bubble_rate(), DoubleEq(3.0 / 9));
  EXPECT_EQ(simulation.bubble_time(), 3);
}

TEST(Simulate, TakesCostsByStageAndMessagesBetweenRanks) {
  Costs costs;
  costs.forward = {1, 2};
  costs.full = {3, 4};
  costs.communication = {10, 99};
  Simulation simulation = simulate_schedule(gpipe_schedule(2, 1), costs);
  EXPECT_THAT(simulation.spans[0], ElementsAre(Span{0, 1}, Span{27, 30}));
  EXPECT_THAT(simulation.spans[1], ElementsAre(Span{11, 13}, Span{13, 17}));
  EXPECT_EQ(simulate_schedule(lower_schedule(gpipe_schedule(2, 1)), costs).makespan, 30);
}

TEST(Simulate, MessagesWithinARankCostNothing) {
  Costs costs;
  costs.communication = {10};
  EXPECT_EQ(simulate_schedule(interleaved_1f1b_schedule(1, 3, 2), costs).makespan, 18);
}

// (p - 1)(F + I + W) of 1F1B, in the paper's appendix, for costs that differ.
TEST(Simulate, OneForwardOneBackwardHasTheBubbleOfItsFormula) {
  for (int p : {2, 4, 8}) {
    Costs costs;
    costs.forward = {3};
    costs.input = {4};
    costs.weight = {2};
    Simulation simulation = simulate_schedule(one_f_one_b_schedule(p, 3 * p), costs);
    EXPECT_DOUBLE_EQ(simulation.bubble_time(), (p - 1) * (3 + 4 + 2));
    EXPECT_DOUBLE_EQ(simulation.max_peak_memory(), p);
  }
}

TEST(Simulate, APairHidesTheShorterHalfIfAsked) {
  Schedule schedule = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
  Costs costs;
  EXPECT_EQ(simulate_schedule(schedule, costs).makespan, 6);
  costs.overlap = 1;
  EXPECT_EQ(simulate_schedule(schedule, costs).makespan, 5);
  EXPECT_THAT(simulate_schedule(schedule, costs).busy, ElementsAre(5));
  costs.overlap = 0.5;
  EXPECT_EQ(simulate_schedule(schedule, costs).makespan, 5.5);
}

TEST(Simulate, ActivationsAreHeldUntilTheWeightBackwardUnlessSaidOtherwise) {
  Schedule schedule = parse_csv("0F0,0I0,0F1,0I1,0W0,0W1\n");
  Costs costs;
  EXPECT_EQ(simulate_schedule(schedule, costs).max_peak_memory(), 2);
  costs.held_for_weight = {0.25};
  EXPECT_EQ(simulate_schedule(schedule, costs).max_peak_memory(), 1.25);
  costs.activation = {100};
  EXPECT_EQ(simulate_schedule(schedule, costs).max_peak_memory(), 125);
}

TEST(Simulate, CountsGradientsFromTheirFirstBackwardAndWhatActionsWorkIn) {
  Costs costs;
  costs.activation = {10};
  costs.gradient = {100};
  costs.working = {.forward = {1}, .input = {2}, .weight = {3}, .full = {4}, .first_weight = {50}, .first_full = {60}};
  const auto peak = [&](const char* csv) { return simulate_schedule(parse_csv(csv), costs).max_peak_memory(); };
  EXPECT_EQ(peak("0F0,0F1,0B0,0B1\n"), 110 + 60);          // 20 before and 110 after the first backward
  EXPECT_EQ(peak("0F0,0B0,0F1,0F2,0B1,0B2\n"), 100 + 60);  // later: 120 and 4
  EXPECT_EQ(peak("0F0,0F1,0I0,0I1,0W0,0W1\n"), 110 + 50);  // held until the weight half
  costs.working.first_weight = costs.working.first_full = {0};
  EXPECT_EQ(peak("0F0,0B0,0F1,0F2,0B1,0B2\n"), 120 + 4);
}

TEST(Simulate, CountsValuesThatWaitForTheNextStageOnTheirRank) {
  Costs costs;
  costs.activation = {10};
  costs.values = {3};
  // Two values wait, then two gradients.
  EXPECT_EQ(simulate_schedule(parse_csv("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n"), costs).max_peak_memory(), 40);
  EXPECT_EQ(simulate_schedule(parse_csv("0F0,0F1,1F0,1B0,1F1,1B1,0B0,0B1\n"), costs).max_peak_memory(), 33);
  // For another rank they are copied to a message.
  EXPECT_EQ(simulate_schedule(parse_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"), costs).max_peak_memory(), 26);
}

TEST(Simulate, BothEndsOfAMessageCopyIt) {
  Costs costs;
  costs.copies = {0.5, 0};
  EXPECT_EQ(simulate_schedule(parse_csv("0F0,0B0\n1F0,1B0\n"), costs).makespan, 1.5 + 1.5 + 2.5 + 2.5);
  EXPECT_EQ(simulate_schedule(parse_csv("0F0,1F0,1B0,0B0\n"), costs).makespan, 6);
}

TEST(Simulate, CountsMessagesThatComeBeforeTheirTurnAndBuffersForThem) {
  // Rank 0 sends the second value before the first gradient, which is what rank 1 waits for.
  const Schedule schedule = parse_csv("0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  Costs costs;
  costs.activation = {10, 10, 10};
  costs.values = {3, 0, 0};
  const auto peak = [&] { return simulate_schedule(schedule, costs).peak_memory.at(1); };
  EXPECT_EQ(peak(), 10 + 3);
  costs.working.full = costs.working.first_full = {0, 1, 0};
  EXPECT_EQ(peak(), 10 + 3 + 1);
  costs.buffers = {100, 0, 0};
  EXPECT_EQ(peak(), 10 + 100 + 1);  // one is left
}

TEST(Simulate, KeepsAMessageUntilThePeerHasTakenAllThatCameBefore) {
  // Rank 0 takes the gradient 1B0 before the value 1F1, which rank 1 sent first: 0F2 acknowledges neither.
  const Schedule schedule = parse_csv("0F0,0F1,2F0,2B0,0B0,0F2,2F1,2B1,0B1,2F2,2B2,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n");
  Costs costs;
  costs.activation = {10, 10, 10};
  costs.values = {0, 7, 0};
  costs.buffers = {0, 100, 0};
  // In 1F2: two microbatches, buffers for two gradients, the message of 1F1, and that of 1F2 with its value.
  EXPECT_EQ(simulate_schedule(schedule, costs).peak_memory.at(1), 20 + 200 + 7 + 14);
}

TEST(Simulate, TakesForwardOnlyTables) { EXPECT_EQ(simulate_schedule(forward_only(gpipe_schedule(3, 4))).makespan, 6); }

TEST(Simulate, RefusesCostsThatAreNone) {
  Schedule schedule = gpipe_schedule(2, 1);
  EXPECT_THROW(simulate_schedule(schedule, {.forward = {1, 2, 3}}), Error);
  EXPECT_THROW(simulate_schedule(schedule, {.forward = {}}), Error);
  EXPECT_THROW(simulate_schedule(schedule, {.input = {-1}}), Error);
  EXPECT_THROW(simulate_schedule(schedule, {.weight = {std::nan("")}}), Error);
  EXPECT_THROW(simulate_schedule(schedule, {.overlap = 2}), Error);
}

TEST(Simulate, RefusesATableThatCannotRun) {
  EXPECT_THROW(simulate_schedule(parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")), Error);
}

}  // namespace
}  // namespace plumb
