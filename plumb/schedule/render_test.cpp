#include "plumb/schedule/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

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

TEST(Render, TextOfALoweredTableLeavesMessagesOut) {
  Schedule schedule = lower_schedule(one_f_one_b_schedule(2, 2));
  EXPECT_THAT(render_text(schedule, simulate_schedule(schedule).spans, 9), HasSubstr("|FF..BB.BB|"));
}

TEST(Render, SvgHasABoxForEveryAction) {
  Schedule schedule = zbv_schedule(2, 3);
  schedule.name = "a<b";
  std::string svg = render_svg(schedule, simulate_schedule(schedule).spans);
  std::size_t boxes = 0;
  for (auto at = svg.find("<g>"); at != std::string::npos; at = svg.find("<g>", at + 1)) ++boxes;
  EXPECT_EQ(boxes, schedule.num_actions());
  EXPECT_THAT(svg, HasSubstr("<title>3I0: "));
  EXPECT_THAT(svg, HasSubstr("a&lt;b"));
}

TEST(Render, TraceHasEveryActionWithItsTime) {
  Schedule schedule = gpipe_schedule(2, 1);
  auto trace = nlohmann::json::parse(render_chrome_trace(schedule, simulate_schedule(schedule).spans, 1000));
  ASSERT_EQ(trace["traceEvents"].size(), 6u);
  EXPECT_EQ(trace["traceEvents"][4]["name"], "1F0");
  EXPECT_EQ(trace["traceEvents"][4]["ts"], 1000);
  EXPECT_EQ(trace["traceEvents"][4]["dur"], 1000);
}

TEST(Render, RefusesSpansOfAnotherTableAndSizesNobodyCanLookAt) {
  Schedule schedule = gpipe_schedule(2, 1);
  TimeLine spans = simulate_schedule(schedule).spans;
  EXPECT_THROW(render_text(schedule, {}), Error);
  EXPECT_THROW(render_text(schedule, spans, 0), Error);
  EXPECT_THROW(render_svg(schedule, spans, {.width = 0}), Error);
  spans[0].pop_back();
  EXPECT_THROW(render_svg(schedule, spans), Error);
  spans = {{{0, 1}, {2, 1}}, {{0, 1}, {1, 2}}};
  EXPECT_THROW(render_chrome_trace(schedule, spans), Error);
}

}  // namespace
}  // namespace plumb
