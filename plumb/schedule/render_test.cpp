#include "plumb/schedule/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/lower.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

TEST(Render, TextShowsWhatEachRankDoes) {
  Schedule schedule = one_f_one_b_schedule(2, 2);
  TimeLine spans = simulate_schedule(schedule).spans;
  EXPECT_EQ(render_text(schedule, spans, 9), "rank 0 |FF..BB.BB| 67%\nrank 1 |.FBBFBB..| 67%\n");
  EXPECT_EQ(render_text(schedule, spans, 18), "rank 0 |FFFF....BBBB..BBBB| 67%\nrank 1 |..FFBBBBFFBBBB....| 67%\n");
}

TEST(Render, ExplainsTheLettersThatItDraws) {
  EXPECT_EQ(render_letters(lower_schedule(one_f_one_b_schedule(2, 2))),
            "F forward, B backward, . idle; the share at the end: time at work\n");
  EXPECT_THAT(render_letters(zbv_schedule(2, 3)), HasSubstr("I input half of a backward, W weight half of a backward"));
}

TEST(Render, TextOfALoweredTableLeavesMessagesOut) {
  Schedule schedule = lower_schedule(one_f_one_b_schedule(2, 2));
  EXPECT_THAT(render_text(schedule, simulate_schedule(schedule).spans, 9), HasSubstr("|FF..BB.BB|"));
}

TEST(Render, RefusesSpansOfAnotherTableAndSizesNobodyCanLookAt) {
  Schedule schedule = gpipe_schedule(2, 1);
  TimeLine spans = simulate_schedule(schedule).spans;
  EXPECT_THROW(render_text(schedule, {}), Error);
  EXPECT_THROW(render_text(schedule, spans, 0), Error);
  spans[0].pop_back();
  EXPECT_THROW(render_text(schedule, spans), Error);
  spans = {{{0, 1}, {2, 1}}, {{0, 1}, {1, 2}}};
  EXPECT_THROW(render_text(schedule, spans), Error);
}

}  // namespace
}  // namespace plumb
