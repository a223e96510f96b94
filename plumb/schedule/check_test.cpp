#include "plumb/schedule/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/lower.h"

namespace plumb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

CheckReport check_text(const char* csv, const StageEdges& edges = {}, const CheckOptions& options = {}) {
  return check_schedule(parse_csv(csv), edges, options);
}

TEST(Check, AcceptsAGoodTableAndTellsItsMemory) {
  CheckReport report = check_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.text(), "ok");
  EXPECT_THAT(report.peak_memory, ElementsAre(2, 1));
  EXPECT_TRUE(report.weights_in_microbatch_order);
}

TEST(Check, NamesAMissingAction) {
  EXPECT_EQ(check_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n").text(), "1B1 is missing on rank 1");
  EXPECT_EQ(check_text("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1B1\n").text(), "1W0 is missing on rank 1");
  EXPECT_EQ(check_text("0F0,0F1,0B0,0B1\n1F0,1W0,1F1,1B1\n").text(), "1I0 is missing on rank 1");
}

TEST(Check, NamesARepeatedActionAndWhereItWas) {
  EXPECT_EQ(check_text("0F0,0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n").text(),
            "0F0 (rank 0, position 2) repeats 0F0 (rank 0, position 0)");
  EXPECT_THAT(check_text("0F0,0I0,0W0,0B0\n").text(), HasSubstr("a backward is either B or I and W"));
}

TEST(Check, NamesAnActionOnTheWrongRank) {
  Schedule schedule = one_f_one_b_schedule(2, 2);
  schedule.rows[0].push_back(Action::forward(1, 0));
  EXPECT_EQ(check_schedule(schedule).text(),
            "1F0 (rank 0, position 4) stands on rank 0, but stage 1 is placed on rank 1");
}

TEST(Check, TellsALoopGivenToAVSchedule) {
  Schedule schedule = zbv_schedule(3, 4);
  schedule.placement = loop_placement(3, 2);
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("(the table is a V schedule, the placement a loop)"));
  schedule = interleaved_1f1b_schedule(3, 4);
  schedule.placement = v_placement(3);
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("(the table is looped, the placement a V)"));
}

TEST(Check, NamesABackwardBeforeItsForward) {
  CheckReport report = check_text("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n");
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_EQ(report.problems[0].kind, ProblemKind::Order);
  EXPECT_EQ(report.problems[0].rank, 0);
  EXPECT_EQ(report.problems[0].position, 1);
  EXPECT_EQ(report.text(), "0B1 (rank 0, position 1) comes before 0F1 (rank 0, position 2), its forward");
  EXPECT_THAT(check_text("0F0,0W0,0I0\n").text(), HasSubstr("its input backward"));
}

TEST(Check, ExplainsTheRingOfADeadlock) {
  // Rank 0 wants gradient 0 before it sends microbatch 1; rank 1 wants microbatch 1 first.
  CheckReport report = check_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n");
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_EQ(report.problems[0].kind, ProblemKind::Deadlock);
  EXPECT_EQ(report.text(),
            "deadlock: rank 0 stops at 0B0 (position 1), which waits for 1B0 (rank 1, position 2); "
            "rank 1 stops at 1F1 (position 1), which waits for 0F1 (rank 0, position 2)");
}

TEST(Check, APairThatWaitsForItselfIsADeadlock) {
  EXPECT_THAT(check_text("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n").text(), "ok");
  EXPECT_THAT(check_text("(0F0;0B0)OVERLAP_F_B\n").text(), HasSubstr("waits for (0F0;0B0)OVERLAP_F_B"));
}

TEST(Check, BlockingSendsCanDeadlockWhereFreeOnesDoNot) {
  const char* crossed =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
  EXPECT_TRUE(check_text(crossed).ok());
  CheckOptions blocking;
  blocking.blocking_sends = true;
  EXPECT_EQ(check_text(crossed, {}, blocking).text(),
            "deadlock: rank 0 stops at 0SEND_F1 (position 3), which waits for 1RECV_F1 (rank 1, position 4); "
            "rank 1 stops at 1SEND_B0 (position 3), which waits for 0RECV_B0 (rank 0, position 4)");
}

TEST(Check, BlockingReceivesCanDeadlockWherePostedOnesDoNot) {
  const char* early = "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
  EXPECT_THAT(check_text(early).text(), HasSubstr("rank 0 stops at 0RECV_B0 (position 1)"));
  CheckOptions posted;
  posted.blocking_receives = false;
  EXPECT_TRUE(check_text(early, {}, posted).ok());
}

TEST(Check, NamesMessagesWithoutTheirOtherEnd) {
  EXPECT_EQ(check_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n").text(),
            "0SEND_F0 (rank 0, position 1) has no 1RECV_F0 on rank 1");
  EXPECT_EQ(check_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n").text(),
            "0RECV_B0 (rank 0, position 2) has no 1SEND_B0 on rank 1");
  EXPECT_EQ(check_text("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n").text(),
            "1SEND_B0 on rank 1 and 0RECV_B0 on rank 0 are missing");
}

TEST(Check, NamesMessagesOutOfOrder) {
  EXPECT_EQ(check_text("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n").text(),
            "0SEND_F0 (rank 0, position 0) comes before 0F0 (rank 0, position 1), which makes its value");
  EXPECT_EQ(check_text("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n").text(),
            "0B0 (rank 0, position 2) comes before 0RECV_B0 (rank 0, position 3), which receives its gradient");
}

TEST(Check, NamesMessagesNobodyNeeds) {
  EXPECT_THAT(check_text("0F0,0SEND_F0>2,0B0\n1F0,1B0\n2F0,2B0\n").text(),
              HasSubstr("between stages 0 and 2 where there is none"));
  EXPECT_THAT(check_text("0F0,0SEND_F0,1F0,1B0,0B0\n").text(), HasSubstr("two stages of one rank"));
  StageEdges integers = {{0, 1, false}};
  EXPECT_THAT(check_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", integers).text(),
              HasSubstr("moves a gradient between stages 0 and 1"));
  EXPECT_TRUE(check_text("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n", integers).ok());
}

TEST(Check, SkipConnectionsAreDependencies) {
  // Stage 2 of microbatch 0 does not need stage 1 here, and stage 1 not stage 0.
  const char* table = "0F0,0B0\n1F0,1B0\n2F0,2B0\n";
  EXPECT_TRUE(check_text(table, {{0, 2}}).ok());
  EXPECT_THROW(check_text(table, {{2, 0}}), Error);
  EXPECT_THROW(check_text(table, {{0, 3}}), Error);
  EXPECT_THROW(check_text(table, {{0, 1}, {0, 1}}), Error);
}

TEST(Check, NamesEntriesThatMeetInTheWrongOrder) {
  const char* overtaking =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";
  CheckOptions streams;
  streams.blocking_receives = false;
  EXPECT_TRUE(check_text(overtaking, {}, streams).ok()) << "messages have tags";
  streams.in_order = true;
  CheckReport report = check_text(overtaking, {}, streams);
  EXPECT_EQ(
      report.text(),
      "0SEND_F0 (rank 0, position 1) meets 1RECV_F1 (rank 1, position 0): each is number 1 from rank 0 to rank 1, "
      "and messages of two ranks match in order");
  EXPECT_EQ(report.problems[0].kind, ProblemKind::Message);
}

TEST(Check, AStreamForEachDirectionIsEnoughWhereBothRanksSendFirst) {
  const char* crossed =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
  CheckOptions streams{.in_order = true};
  EXPECT_TRUE(check_text(crossed, {}, streams).ok());
  streams.blocking_sends = true;
  EXPECT_THAT(check_text(crossed, {}, streams).text(), HasSubstr("deadlock: rank"));
}

TEST(Check, MemoryOverTheLimitIsNamedWhereItHappens) {
  CheckOptions options;
  options.memory_limit = 3;
  CheckReport report = check_schedule(gpipe_schedule(1, 4), {}, options);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_EQ(report.problems[0].kind, ProblemKind::Memory);
  EXPECT_EQ(report.problems[0].position, 3);
  options.memory_limit = 4;
  EXPECT_TRUE(check_schedule(gpipe_schedule(1, 4), {}, options).ok());
}

TEST(Check, MemoryOfThirdsKeepsToItsLimit) {
  CheckOptions options;
  options.memory_limit = check_schedule(interleaved_1f1b_schedule(4, 8, 3)).peak_memory[0];
  EXPECT_TRUE(check_schedule(interleaved_1f1b_schedule(4, 8, 3), {}, options).ok());
}

TEST(Check, SurroundingActionsHaveTheirPlace) {
  EXPECT_TRUE(check_text("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n").ok());
  EXPECT_THAT(check_text("0UNSHARD,0F0,0RESHARD,0B0\n").text(),
              HasSubstr("0B0 (rank 0, position 3) runs while its stage is sharded"));
  EXPECT_THAT(check_text("0F0,0F1,0B0,0REDUCE_GRAD,0B1\n").text(), HasSubstr("makes a gradient after 0REDUCE_GRAD"));
  EXPECT_THAT(check_text("0UNSHARD,0UNSHARD,0F0,0B0\n").text(), HasSubstr("finds the stage whole already"));
}

TEST(Check, ForwardOnlyTablesAreAskedFor) {
  Schedule schedule = forward_only(zbv_schedule(2, 3));
  EXPECT_FALSE(check_schedule(schedule).ok());
  CheckOptions options;
  options.forward_only = true;
  EXPECT_TRUE(check_schedule(schedule, {}, options).ok());
  EXPECT_THAT(check_schedule(zbv_schedule(2, 3), {}, options).text(),
              HasSubstr("is a backward in a schedule without any"));
}

TEST(Check, ShapesThatCannotBeAreReportedNotIndexed) {
  Schedule schedule = gpipe_schedule(2, 2);
  schedule.num_microbatches = 1 << 30;
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("too few"));
  schedule.num_microbatches = 0;
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("at least one of each"));
  schedule.num_microbatches = 1;
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("names microbatch 1"));
  schedule = gpipe_schedule(2, 2);
  schedule.placement.ranks[1] = 7;
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("stage 1 is placed on rank 7"));
  schedule = gpipe_schedule(2, 2);
  schedule.rows[0].push_back(Action::forward(9, 0));
  EXPECT_THAT(check_schedule(schedule).text(), HasSubstr("names stage 9"));
  EXPECT_FALSE(check_schedule(Schedule{}).ok());
}

TEST(Check, ManyProblemsAreCounted) {
  Schedule schedule = gpipe_schedule(2, 50);
  for (auto& row : schedule.rows) row.resize(row.size() / 2);
  CheckReport report = check_schedule(schedule);
  EXPECT_EQ(report.num_problems, 100u);
  EXPECT_EQ(report.problems.size(), 20u);
  EXPECT_THAT(report.text(), HasSubstr("and 80 more"));
}

TEST(Check, RequireRunnableNamesTheScheduleAndItsProblem) {
  Schedule schedule = gpipe_schedule(2, 2);
  schedule.rows[1].pop_back();
  try {
    require_runnable(schedule);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Schedule);
    EXPECT_EQ(error.message(), "the schedule GPipe cannot run: 1B1 is missing on rank 1");
  }
}

}  // namespace
}  // namespace plumb
