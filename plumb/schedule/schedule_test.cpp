// Actions, tables, CSV.
#include "plumb/schedule/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Action, TextRoundTripsForEveryKind) {
  for (const char* text : {"2F0", "1I3", "0W3", "0B1", "1SEND_F2", "2RECV_F2", "1SEND_B2", "0RECV_B2", "3UNSHARD",
                           "3RESHARD", "3REDUCE_GRAD", "(0F5;7B2)OVERLAP_F_B", "(0F5;7I2)OVERLAP_F_B", "0SEND_F2>3",
                           "3RECV_F2<0", "3SEND_B2>0", "0RECV_B2<3", "12F345", ""}) {
    EXPECT_EQ(to_string(parse_action(text)), text);
  }
  for (const char* text : {"1WAIT_SEND_F2", "0WAIT_SEND_B0", "3WAIT_REDUCE_GRAD"})
    EXPECT_EQ(to_string(parse_action(text)), text);
  EXPECT_EQ(parse_action(" 2F0\t"), Action::forward(2, 0));
  EXPECT_TRUE(parse_action("  ").is_idle());
}

TEST(Action, MessagesNameTheOtherEnd) {
  EXPECT_EQ(parse_action("1SEND_F2").other_stage, 2);
  EXPECT_EQ(parse_action("1RECV_F2").other_stage, 0);
  EXPECT_EQ(parse_action("1SEND_B2").other_stage, 0);
  EXPECT_EQ(parse_action("1RECV_B2").other_stage, 2);
  EXPECT_EQ(parse_action("1SEND_F2>2"), parse_action("1SEND_F2"));
}

TEST(Action, AnOverlappedPairHasTwoParts) {
  Action pair = parse_action("(0F5;7B2)OVERLAP_F_B");
  EXPECT_EQ(pair.first_part(), Action::forward(0, 5));
  EXPECT_EQ(pair.second_part(), Action::backward(7, 2));
  EXPECT_TRUE(pair.is_compute());
}

TEST(Action, RefusesEverythingElseAndSaysWhy) {
  EXPECT_THAT(message_of([] { parse_action("2Q0"); }), HasSubstr("'Q' is no kind of action"));
  EXPECT_THAT(message_of([] { parse_action("F0"); }), HasSubstr("the stage is missing"));
  EXPECT_THAT(message_of([] { parse_action("2F"); }), HasSubstr("the microbatch is missing"));
  EXPECT_THAT(message_of([] { parse_action("2F0x"); }), HasSubstr("'x' does not belong there"));
  EXPECT_THAT(message_of([] { parse_action("2UNSHARD1"); }), HasSubstr("'1' does not belong there"));
  EXPECT_THAT(message_of([] { parse_action("0RECV_F1"); }), HasSubstr("stage 0 has no stage before it"));
  EXPECT_THAT(message_of([] { parse_action("99999999999F0"); }), HasSubstr("the stage is too large"));
  EXPECT_THAT(message_of([] { parse_action("2000000000F0"); }), HasSubstr("the stage is too large"));
  EXPECT_THAT(message_of([] { parse_action("-1F0"); }), HasSubstr("the stage is missing"));
  EXPECT_THAT(message_of([] { parse_action("2f0"); }), HasSubstr("'f' is no kind of action"));
  EXPECT_THAT(message_of([] { parse_action("(0F5;7B2"); }), HasSubstr("not closed"));
  EXPECT_THAT(message_of([] { parse_action("(7B2;0F5)OVERLAP_F_B"); }), HasSubstr("a forward, then a backward"));
  EXPECT_THAT(message_of([] { parse_action("((0F1;1B1);7B2)OVERLAP_F_B"); }), HasSubstr("is not an action"));
  EXPECT_LT(message_of([] { parse_action(std::string(100000, 'x')); }).size(), 300u);
  EXPECT_LT(message_of([] { parse_action("1" + std::string(100000, 'x')); }).size(), 300u);
  EXPECT_THAT(message_of([] { parse_action("0OVERLAP_F_B1"); }), HasSubstr("in a bracket"));
}

TEST(Placement, LoopsAndVs) {
  EXPECT_THAT(loop_placement(3, 2).ranks, ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(v_placement(3).ranks, ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT(v_placement(2, 3).ranks, ElementsAre(0, 1, 1, 0, 0, 1));
  EXPECT_THAT(v_placement(3).stages_of(1), ElementsAre(1, 4));
  EXPECT_THAT(message_of([] { loop_placement(0, 2); }), HasSubstr("at least one rank"));
}

TEST(Csv, RoundTripsWithIdleCells) {
  std::string text = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n";
  Schedule schedule = parse_csv(text);
  EXPECT_EQ(to_csv(schedule), text);
  EXPECT_EQ(schedule.num_microbatches, 2);
  EXPECT_THAT(schedule.placement.ranks, ElementsAre(0, 1));
  EXPECT_EQ(schedule.num_actions(), 8u);
}

TEST(Csv, SkipsCommentsAndBlankLinesAndTakesAnyLineEnd) {
  Schedule schedule = parse_csv("# two ranks\r\n\r\n0F0, 0B0  # first\r\n   \n1F0,1B0");
  EXPECT_EQ(schedule.num_ranks(), 2);
  EXPECT_EQ(to_csv(schedule), "0F0,0B0\n1F0,1B0\n");
  EXPECT_EQ(to_csv(parse_csv("\xEF\xBB\xBF 0F0,0B0\n")), "0F0,0B0\n") << "a spreadsheet's";
}

TEST(Csv, ErrorsNameLineRankAndColumn) {
  std::string message = message_of([] { parse_csv("# head\n0F0,0B0\n1F0,1X0\n", "a.csv"); });
  EXPECT_THAT(message, HasSubstr("'1X0' is not an action"));
  EXPECT_THAT(message, HasSubstr("a.csv, line 3 (rank 1), column 2"));
}

TEST(Csv, ANumberBeyondTheTableSizesNothing) {
  EXPECT_THAT(message_of([] { parse_csv("0F0,0F900000000,0B0\n"); }), HasSubstr("names number 900000000"));
  EXPECT_THAT(message_of([] { parse_csv("0F0,900000000REDUCE_GRAD,0B0\n"); }), HasSubstr("rank 0, column 2"));
}

TEST(Csv, EmptyTablesAreErrors) {
  EXPECT_THAT(message_of([] { parse_csv(""); }), HasSubstr("no rows"));
  EXPECT_THAT(message_of([] { parse_csv("# nothing\n"); }), HasSubstr("no rows"));
  EXPECT_THAT(message_of([] { parse_csv("0UNSHARD,0RESHARD\n"); }), HasSubstr("computes nothing"));
}

TEST(Csv, FilesRoundTripAndMissingOnesAreNamed) {
  std::string path = (std::filesystem::path(::testing::TempDir()) / "plumb_schedule_test.csv").string();
  Schedule schedule = dual_pipe_v_schedule(2, 5);
  write_csv(schedule, path);
  Schedule read = read_csv(path);
  EXPECT_EQ(read.rows, schedule.rows);
  EXPECT_EQ(read.placement, schedule.placement);
  std::filesystem::remove(path);
  EXPECT_THAT(message_of([&] { read_csv(path); }), HasSubstr("plumb_schedule_test.csv"));
}

TEST(Ticks, IdleEntriesShowWaiting) {
  EXPECT_EQ(to_csv(with_idle_ticks(one_f_one_b_schedule(2, 2))), "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n");
  Schedule schedule = interleaved_1f1b_schedule(3, 7, 2);
  EXPECT_EQ(without_idle(with_idle_ticks(schedule)), schedule);
}

}  // namespace
}  // namespace plumb
