#include "plumb/schedule/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

Costs unit_costs() {
  Costs costs;
  costs.activation = {1};
  return costs;
}

const ScheduleChoice& find(const std::vector<ScheduleChoice>& choices, const std::string& name) {
  return *std::find_if(choices.begin(), choices.end(), [&](const auto& c) { return c.name == name; });
}

TEST(Compare, ListsEveryScheduleQuickestFirst) {
  auto choices = compare_schedules(4, 8, even_costs(unit_costs(), 4));
  EXPECT_EQ(choices.size(), schedule_names().size() + 1);
  for (size_t i = 1; i < choices.size(); ++i) {
    if (choices[i].problem.empty())
      EXPECT_LE(choices[i - 1].simulation.makespan, choices[i].simulation.makespan * (1 + 1e-9));
  }
  EXPECT_DOUBLE_EQ(find(choices, "1F1B").simulation.cost(), 33);
  EXPECT_DOUBLE_EQ(find(choices, "1F1B").peak(), 4);
  EXPECT_DOUBLE_EQ(find(choices, "GPipe").peak(), 8);
  EXPECT_DOUBLE_EQ(find(choices, "ZBVZeroBubble").simulation.cost(), 24) << "no bubble by the paper's definition";
  EXPECT_DOUBLE_EQ(find(choices, "ZBVZeroBubble").peak(), 4);
}

TEST(Compare, PutsThoseThatTakeTooMuchMemoryLast) {
  CompareOptions options;
  options.memory_limit = 4;
  auto choices = compare_schedules(4, 8, even_costs(unit_costs(), 4), options);
  EXPECT_TRUE(choices.front().fits);
  EXPECT_LE(choices.front().peak(), 4 + 1e-9);
  EXPECT_FALSE(find(choices, "GPipe").fits);
  EXPECT_TRUE(find(choices, "1F1B").fits);
  const auto& searched = find(choices, "Searched");
  EXPECT_LE(searched.simulation.cost(), find(choices, "ZBH1").simulation.cost() + 1e-9);
  EXPECT_TRUE(check_schedule(searched.schedule).ok());
}

TEST(Compare, CountsWhatStagesTakeWhateverTheSchedule) {
  CompareOptions options;
  options.memory_limit = 14;
  options.names = {"1F1B", "GPipe"};
  auto costs = [&](int stages) {
    StageCosts c = even_costs(unit_costs(), 4)(stages);
    c.resident = {10, 1, 1, 1};
    return c;
  };
  auto choices = compare_schedules(4, 8, costs, options);
  EXPECT_THAT(find(choices, "1F1B").memory, ::testing::ElementsAre(14, 4, 3, 2));
  EXPECT_TRUE(find(choices, "1F1B").fits);
  EXPECT_FALSE(find(choices, "GPipe").fits);
}

TEST(Compare, SaysWhyOneCannotBeHad) {
  auto choices = compare_schedules(3, 2, even_costs(unit_costs(), 3));
  EXPECT_THAT(find(choices, "DualPipe").problem, HasSubstr("3 ranks do not allow"));
  EXPECT_FALSE(find(choices, "DualPipe").fits);
  EXPECT_TRUE(choices.front().problem.empty());
  EXPECT_FALSE(choices.back().problem.empty());
  CompareOptions one;
  one.names = {"1F1B"};
  auto none =
      compare_schedules(2, 2, [](int) -> StageCosts { throw Error(ErrorKind::InvalidArgument, "too few"); }, one);
  EXPECT_THAT(none.at(0).problem, HasSubstr("too few"));
}

TEST(Compare, TriesSeveralStagesARank) {
  CompareOptions options;
  options.stages_per_rank = {2, 4};
  options.names = {"Interleaved1F1B", "1F1B", "ZBVZeroBubble"};
  auto choices = compare_schedules(2, 8, even_costs(unit_costs(), 2), options);
  EXPECT_EQ(choices.size(), 4u);
  EXPECT_EQ(choices.front().name, "ZBVZeroBubble");
}

TEST(Compare, RefusesWhatDoesNotExist) {
  EXPECT_THROW(compare_schedules(0, 8, even_costs({}, 1)), Error);
  CompareOptions options;
  options.names = {"Nope"};
  EXPECT_THROW(compare_schedules(2, 8, even_costs({}, 2), options), Error);
  options = {.stages_per_rank = {2, 0}};
  EXPECT_THROW(compare_schedules(2, 8, even_costs({}, 2), options), Error);
  EXPECT_THROW(compare_schedules(2, 8, nullptr), Error);
  EXPECT_THROW(resident_memory({.costs = {}, .resident = {1, 2}}, {2}), Error);
  EXPECT_THROW(Costs().for_stages(-1, 1), Error);
}

}  // namespace
}  // namespace plumb
