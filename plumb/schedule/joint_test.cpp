// Joint plans: within the limits, runnable, and never slower than the named schedules they start from.
#include "plumb/schedule/joint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/event_simulation.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/pieces.h"
#include "tests/message_of.h"
#include "tests/uneven_models.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

JointOptions quick(double limit = std::numeric_limits<double>::infinity()) {
  return {.memory_limit = limit,
          .names = {"1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "VMin"},
          .tables = 6000};
}

void expect_sound(const JointResult& found, const PieceCosts& pieces, double limit) {
  const CheckReport report = check_schedule(found.schedule);
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_TRUE(report.weights_in_microbatch_order);
  EXPECT_LE(*std::ranges::max_element(found.memory), limit * (1 + 1e-9));
  EXPECT_LE(found.simulation.makespan, found.named.simulation.makespan * (1 + 1e-9));
  for (const double share : found.shares) EXPECT_LE(share, 1 + 1e-9);
  // The simulator finds the times and the memory that the search counted.
  const StageCosts costs = costs_of_stages(pieces, found.stages);
  const Simulation again = simulate_schedule(found.schedule, costs.costs);
  EXPECT_DOUBLE_EQ(again.makespan, found.simulation.makespan);
  EXPECT_NEAR(again.makespan / found.named.simulation.makespan, found.shares[0], 1e-9);
  for (int rank = 0; rank < found.schedule.num_ranks(); ++rank)
    EXPECT_NEAR(resident_memory(costs, found.schedule.placement.stages_of(rank)) + again.peak_memory[rank],
                found.memory[rank], 1e-6);
}

TEST(Joint, IsNeverSlowerThanTheBestNamedScheduleInTheSameMemory) {
  for (const char* name : uneven_models) {
    SCOPED_TRACE(name);
    const PieceCosts pieces = pieces_of(uneven(name, 24));
    const JointResult found = joint_search(4, 4, pieces, quick());
    expect_sound(found, pieces, found.named.peak());
    EXPECT_LT(found.simulation.makespan, 0.99 * found.named.simulation.makespan);
  }
}

// The work that is left tells early that a step comes too late, and never of one that does not.
TEST(Joint, GivesATableUpIfAndOnlyIfItEndsTooLate) {
  const PieceCosts pieces = pieces_of(uneven("unet", 24));
  for (const std::string& name : quick().names) {
    SCOPED_TRACE(name);
    const Schedule schedule = make_schedule(name, 4, 8);
    const PieceStages stages = balanced_stages(pieces, schedule.num_stages());
    auto times =
        schedule_internal::PieceSums(pieces, 1, [](int) { return 1.0; }).times(stages, schedule.placement.ranks, 4, 3);
    times.costs = schedule_internal::RankCosts(std::move(times.costs), times.rank);
    const auto rows = schedule_internal::without_pairs(schedule.rows);
    schedule_internal::TableTimer timer(8);
    const double length = timer.replay(times, rows);
    EXPECT_EQ(timer.replay(times, rows, length), length);
    EXPECT_EQ(timer.replay(times, rows, 0.9999 * length), schedule_internal::kForever);
    schedule_internal::ListHabits habits;
    habits.halves.assign(stages.begins.size(), name != "1F1B");
    const double made = timer.make(times, habits, schedule_internal::kForever, nullptr);
    const double whole = timer.actions();
    EXPECT_EQ(timer.make(times, habits, schedule_internal::kForever, nullptr, made), made);
    const double again = timer.actions() - whole;
    EXPECT_EQ(timer.make(times, habits, schedule_internal::kForever, nullptr, 0.7 * made), schedule_internal::kForever);
    EXPECT_LT(timer.actions() - whole - again, again);
  }
}

TEST(Joint, KeepsTheMemoryLimitAndSaysTheLeastThatOneNeeds) {
  const PieceCosts pieces = pieces_of(uneven("experts", 16));
  const JointResult free = joint_search(4, 8, pieces, quick());
  const double tight = 0.8 * free.named.peak();
  const JointResult found = joint_search(4, 8, pieces, quick(tight));
  expect_sound(found, pieces, tight);
  EXPECT_THAT(message_of([&] { joint_search(4, 8, pieces, quick(0.01)); }), HasSubstr("the least is"));
}

TEST(Joint, TheSameNumbersGiveTheSamePlan) {
  const PieceCosts pieces = pieces_of(uneven("unet", 16));
  const JointResult one = joint_search(4, 8, pieces, quick()), other = joint_search(4, 8, pieces, quick());
  EXPECT_EQ(one.schedule, other.schedule);
  EXPECT_EQ(one.stages.begins, other.stages.begins);
}

TEST(Joint, ComputesAgainWhereMemoryIsShortAndNotElsewhere) {
  PieceCosts pieces = pieces_of(uneven("head", 12));
  pieces.ways.push_back(pieces.ways[0]);  // "none": as quick as it gets, and twice the memory
  pieces.ways[1].recompute = "none";
  for (double& value : pieces.ways[0].input) value *= 1.3;
  for (double& value : pieces.ways[0].full) value *= 1.15;
  for (double& value : pieces.ways[1].activation) value *= 2;
  const JointResult wide = joint_search(2, 4, pieces, quick(1e6));
  EXPECT_EQ(std::ranges::count(wide.stages.ways, 0), 0) << "memory is no matter";
  const JointResult tight = joint_search(2, 4, pieces, quick(1.02 * wide.named.peak()));
  expect_sound(tight, pieces, 1.02 * wide.named.peak());
  EXPECT_GT(std::ranges::count(tight.stages.ways, 0), 0);
}

TEST(Joint, PlansWhatTakesNoTime) {
  PieceCosts pieces = pieces_of(uneven("head", 8), 0);
  PieceCosts::Way& way = pieces.ways[0];
  for (auto* list : {&way.forward, &way.input, &way.weight, &way.full}) std::ranges::fill(*list, 0);
  EXPECT_EQ(joint_search(2, 4, pieces, quick()).simulation.makespan, 0);
}

TEST(Joint, RefusesCostsAndCountsThatCannotBe) {
  PieceCosts pieces = pieces_of(uneven("head", 8));
  EXPECT_THROW(joint_search(0, 4, pieces), Error);
  EXPECT_THAT(message_of([&] { joint_search(16, 4, pieces, quick()); }), HasSubstr("8 pieces"));
  pieces.ways[0].input[3] = -1;
  EXPECT_THAT(message_of([&] { joint_search(2, 4, pieces); }), HasSubstr("input backward cost -1"));
  pieces.ways[0].input.pop_back();
  EXPECT_THAT(message_of([&] { joint_search(2, 4, pieces); }), HasSubstr("7 entries for 8 pieces"));
  EXPECT_THROW(joint_search(2, 4, PieceCosts{}), Error);
}

}  // namespace
}  // namespace plumb
