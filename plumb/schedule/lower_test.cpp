#include "plumb/schedule/lower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/simulate.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

TEST(Lower, PutsMessagesBehindTheirValuesAndBeforeTheirUse) {
  EXPECT_EQ(to_csv(lower_schedule(one_f_one_b_schedule(2, 2))),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n");
}

TEST(Lower, SendsNothingBetweenStagesOfOneRank) {
  EXPECT_EQ(lower_schedule(zbv_schedule(1, 3)), zbv_schedule(1, 3));
  std::string text = to_csv(lower_schedule(zbv_schedule(2, 1)));
  EXPECT_EQ(text,
            "0F0,0SEND_F0,3RECV_F0,3F0,3I0,3SEND_B0,3W0,0RECV_B0,0I0,0W0\n"
            "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2I0,2W0,1I0,1SEND_B0,1W0\n");
}

TEST(Lower, SkipConnectionsGoStraightToEachUser) {
  StageEdges edges = {{0, 1}, {1, 2}, {0, 2}};
  Schedule lowered = lower_schedule(gpipe_schedule(3, 1), edges);
  EXPECT_EQ(to_csv(lowered),
            "0F0,0SEND_F0,0SEND_F0>2,0RECV_B0<2,0RECV_B0,0B0\n"
            "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n"
            "2RECV_F0<0,2RECV_F0,2F0,2B0,2SEND_B0,2SEND_B0>0\n");
  EXPECT_TRUE(check_schedule(lowered, edges).ok());
  EXPECT_FALSE(check_schedule(lowered).ok());
}

TEST(Lower, NamesTheMessagesOfTwoRanksThatMeet) {
  Schedule lowered = lower_schedule(one_f_one_b_schedule(2, 4));
  std::vector<std::vector<int>> meets = meeting_messages(lowered);
  int pairs = 0;
  for (int rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i < meets[rank].size(); ++i) {
      if (meets[rank][i] < 0) continue;
      const Action &one = lowered.rows[rank][i], &other = lowered.rows[rank][static_cast<std::size_t>(meets[rank][i])];
      EXPECT_NE(one.is_send(), other.is_send());
      EXPECT_EQ(meets[rank][static_cast<std::size_t>(meets[rank][i])], static_cast<int>(i));
      ++pairs;
    }
  }
  EXPECT_EQ(pairs, 4 * 2) << to_csv(lowered);  // in the steady state, from both ranks' sides
  for (const auto& row : meeting_messages(lower_schedule(gpipe_schedule(3, 4)))) {
    for (int other : row) EXPECT_EQ(other, -1) << "all forwards come before all backwards";
  }
}

TEST(Lower, ValuesWithoutGradientComeBackWithNone) {
  StageEdges edges = {{0, 1, false}};
  EXPECT_EQ(to_csv(lower_schedule(gpipe_schedule(2, 1), edges)), "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n");
}

TEST(Lower, SplitsPairsUnlessAskedToKeepThem) {
  Schedule schedule = dual_pipe_v_schedule(2, 4);
  EXPECT_THAT(to_csv(schedule), HasSubstr("OVERLAP"));
  Schedule split = lower_schedule(schedule), kept = lower_schedule(schedule, {}, {.keep_pairs = true});
  EXPECT_THAT(to_csv(split), ::testing::Not(HasSubstr("OVERLAP")));
  EXPECT_THAT(to_csv(kept), HasSubstr("OVERLAP"));
  EXPECT_TRUE(check_schedule(split).ok());
  EXPECT_TRUE(check_schedule(kept).ok());
  EXPECT_LE(simulate_schedule(split).makespan, simulate_schedule(kept).makespan);
}

TEST(Lower, AddsReduceGradAfterTheLastWeightGradient) {
  EXPECT_EQ(to_csv(lower_schedule(gpipe_schedule(1, 2), {}, {.reduce_grad = true})), "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n");
}

TEST(Lower, UnshardsStagesAroundTheirUse) {
  Schedule lowered = lower_schedule(gpipe_schedule(1, 1), {}, {.max_unsharded = 1});
  EXPECT_EQ(to_csv(lowered), "0UNSHARD,0F0,0B0,0RESHARD\n");
  lowered = lower_schedule(looped_bfs_schedule(2, 3, 4), {}, {.reduce_grad = true, .max_unsharded = 2});
  EXPECT_TRUE(check_schedule(lowered).ok()) << check_schedule(lowered).text();
  for (const auto& row : lowered.rows) {
    int whole = 0;
    for (const Action& action : row) {
      whole += (action.kind == ActionKind::Unshard) - (action.kind == ActionKind::Reshard);
      EXPECT_LE(whole, 2);
    }
    EXPECT_EQ(whole, 0);
  }
}

TEST(Lower, TakesForwardOnlyTables) {
  EXPECT_EQ(to_csv(lower_schedule(forward_only(one_f_one_b_schedule(2, 2)))),
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n");
}

TEST(Lower, RefusesLoweredAndBrokenTables) {
  EXPECT_THROW(lower_schedule(lower_schedule(gpipe_schedule(2, 2))), Error);
  EXPECT_THROW(lower_schedule(parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")), Error);
}

TEST(Lower, AnyTableWithAnySkipConnectionsRunsEvenWithBlockingMessages) {
  EXPECT_TRUE(rc::check([] {
    const std::string& name = schedule_names()[*rc::gen::inRange<std::size_t>(0, schedule_names().size())];
    Schedule schedule = make_schedule(name, 2 * *rc::gen::inRange(1, 4), *rc::gen::inRange(1, 12));
    StageEdges edges = chain_edges(schedule.num_stages());
    for (int from = 0; from < schedule.num_stages(); ++from) {
      for (int to = from + 2; to < schedule.num_stages(); ++to) {
        if (*rc::gen::inRange(0, 4) == 0) edges.push_back({from, to, *rc::gen::arbitrary<bool>()});
      }
    }
    LowerOptions options;
    options.keep_pairs = *rc::gen::arbitrary<bool>();
    options.reduce_grad = *rc::gen::arbitrary<bool>();
    options.max_unsharded = *rc::gen::inRange(0, 4);
    CheckOptions blocking;
    blocking.blocking_sends = true;
    CheckReport report = check_schedule(lower_schedule(schedule, edges, options), edges, blocking);
    RC_LOG() << report.text();
    RC_ASSERT(report.ok());
  }));
}

TEST(Lower, SurroundingsFollowUse) {
  auto text = [](const std::vector<Action>& row) {
    std::string out;
    for (const Action& a : row) out += to_string(a) + " ";
    return out;
  };
  const auto row = parse_csv("0F0,,2F0,4F0,4B0,2B0,0B0\n").rows[0];
  EXPECT_EQ(text(with_surroundings(row, {.reduce_grad = true, .max_unsharded = 2})),
            "0UNSHARD 2UNSHARD 0F0 0RESHARD 4UNSHARD 2F0 4F0 4B0 4REDUCE_GRAD 4RESHARD 0UNSHARD 2B0 2REDUCE_GRAD "
            "2RESHARD 0B0 0REDUCE_GRAD 0RESHARD ");
  EXPECT_EQ(text(with_surroundings(row, {})), "0F0 2F0 4F0 4B0 2B0 0B0 ");
}

}  // namespace
}  // namespace plumb
