#include "plumb/schedule/generators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/lower.h"
#include "plumb/schedule/simulate.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

// The published figures: F = I = W = 1, full backward 2, a chunk is a unit.
struct Figures {
  const char* name;
  double makespan[2], peak[2];  // for 4 ranks and 8 microbatches, 8 and 32
};

constexpr Figures kFigures[] = {
    {"GPipe", {33, 117}, {8, 32}},        {"1F1B", {33, 117}, {4, 8}},
    {"LoopedBFS", {57, 213}, {8, 32}},    {"Interleaved1F1B", {57, 213}, {5.5, 11.5}},
    {"ZBVZeroBubble", {51, 199}, {4, 8}}, {"InterleavedZeroBubble", {51, 199}, {4, 8}},
    {"DualPipeV", {51, 199}, {4.5, 8.5}},
};

TEST(Generators, HaveThePublishedMakespanAndMemory) {
  for (const Figures& figures : kFigures) {
    SCOPED_TRACE(figures.name);
    for (int i = 0; i < 2; ++i) {
      Schedule schedule = make_schedule(figures.name, i ? 8 : 4, i ? 32 : 8);
      Simulation simulation = simulate_schedule(schedule);
      EXPECT_DOUBLE_EQ(simulation.makespan, figures.makespan[i]);
      EXPECT_DOUBLE_EQ(simulation.max_peak_memory(), figures.peak[i]);
      EXPECT_DOUBLE_EQ(simulate_schedule(lower_schedule(schedule)).makespan, figures.makespan[i]);
    }
  }
  EXPECT_DOUBLE_EQ(simulate_schedule(zbv_schedule(4, 8)).zero_bubble_rate(), 0);
  EXPECT_DOUBLE_EQ(simulate_schedule(zbv_schedule(8, 32)).zero_bubble_rate(), 0);
}

TEST(Generators, OneForwardOneBackwardStartsTheLastRankWithMicrobatchZero) {
  EXPECT_EQ(to_csv(one_f_one_b_schedule(2, 3)), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
}

TEST(Generators, OneForwardOneBackwardWithFewMicrobatchesRunsOnlyThose) {
  EXPECT_EQ(to_csv(one_f_one_b_schedule(3, 1)), "0F0,0B0\n1F0,1B0\n2F0,2B0\n");
}

TEST(Generators, LoopedBfsGoesBackFromTheLastMicrobatchUnlessAscending) {
  EXPECT_EQ(to_csv(looped_bfs_schedule(1, 2, 2)), "0F0,0F1,1F0,1F1,1B1,1B0,0B1,0B0\n");
  EXPECT_EQ(to_csv(looped_bfs_schedule(1, 2, 2, true)), "0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n");
  EXPECT_FALSE(check_schedule(looped_bfs_schedule(2, 4)).weights_in_microbatch_order);
  EXPECT_TRUE(check_schedule(looped_bfs_schedule(2, 4, 2, true)).weights_in_microbatch_order);
  EXPECT_EQ(simulate_schedule(looped_bfs_schedule(4, 8, 3, true)).makespan,
            simulate_schedule(looped_bfs_schedule(4, 8, 3)).makespan);
}

TEST(Generators, InterleavedTakesMicrobatchesInRounds) {
  EXPECT_EQ(to_csv(interleaved_1f1b_schedule(1, 2, 2)), "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1\n");
}

TEST(Generators, NamesIgnoreCaseAndUnknownOnesListTheKnown) {
  EXPECT_EQ(make_schedule("zbvzerobubble", 2, 3), zbv_schedule(2, 3));
  EXPECT_EQ(schedule_traits("GPIPE").name, "GPipe");
  try {
    make_schedule("1F2B", 2, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::UnknownName);
    EXPECT_THAT(error.what(), HasSubstr("no schedule named '1F2B'"));
    for (const std::string& name : schedule_names()) EXPECT_THAT(error.what(), HasSubstr(name));
  }
}

TEST(Generators, RefuseCountsThatMakeNoTable) {
  EXPECT_THROW(gpipe_schedule(0, 1), Error);
  EXPECT_THROW(one_f_one_b_schedule(2, 0), Error);
  EXPECT_THROW(interleaved_1f1b_schedule(2, 2, 0), Error);
  EXPECT_THROW(interleaved_1f1b_schedule(1 << 20, 1, 1 << 20), Error);
  EXPECT_THROW(gpipe_schedule(1 << 13, 1 << 12), Error) << "a table of gigabytes";
  EXPECT_THROW(make_schedule("ZBVZeroBubble", 2, 4, 3), Error);
  EXPECT_THROW(make_schedule("GPipe", 2, 4, 2), Error);
  EXPECT_THROW(make_schedule("Interleaved1F1B", 2, 4, -1), Error);
}

// The formulas of the Zero Bubble paper, for costs that differ.
TEST(Generators, ZeroBubbleSchedulesHaveTheBubbleAndMemoryOfTheirFormulas) {
  for (int p : {2, 4, 8}) {
    for (auto [f, i, w] : {std::tuple{1.0, 1.0, 1.0}, {3.0, 4.0, 2.0}, {5.0, 5.0, 4.0}}) {
      Costs costs;
      costs.forward = {f};
      costs.input = {i};
      costs.weight = {w};
      Simulation h1 = simulate_schedule(zb_h1_schedule(p, 4 * p), costs),
                 h2 = simulate_schedule(zb_h2_schedule(p, 4 * p), costs);
      EXPECT_NEAR(h1.zero_bubble_time(), (p - 1) * (f + i - w), 1e-9) << p << " " << f;
      EXPECT_NEAR(h2.zero_bubble_time(), (p - 1) * std::max(0.0, f + i - 2 * w), 1e-9) << p << " " << f;
      EXPECT_EQ(h1.max_peak_memory(), p);
      EXPECT_EQ(h2.max_peak_memory(), 2 * p - 1);
    }
  }
}

TEST(Generators, VHalfAndVMinTakeAHalfAndAThirdOfTheMemoryForLessBubbleThan1F1B) {
  for (int p : {4, 8, 16, 32}) {
    Costs half_stages;  // the same model: a chunk is half a stage
    half_stages.forward = half_stages.input = half_stages.weight = {0.5};
    Simulation half = simulate_schedule(v_half_schedule(p, 3 * p), half_stages);
    Simulation min = simulate_schedule(v_min_schedule(p, 3 * p), half_stages);
    Simulation plain = simulate_schedule(one_f_one_b_schedule(p, 3 * p));
    EXPECT_LE(half.max_peak_memory(), p / 2.0 + 1);
    EXPECT_LE(min.max_peak_memory(), p / 3.0 + 2);
    EXPECT_LT(half.bubble_time(), 0.7 * plain.bubble_time());
    EXPECT_LT(min.bubble_time(), 0.7 * plain.bubble_time());
  }
}

TEST(Generators, DualPipeRunsEveryStageOnTwoRanks) {
  Schedule schedule = dual_pipe_schedule(4, 8);
  EXPECT_EQ(schedule.placement.rank_of(1, 3), 1);
  EXPECT_EQ(schedule.placement.rank_of(1, 4), 2);
  EXPECT_THAT(schedule.placement.stages_of(0), ::testing::ElementsAre(0, 3));
  Simulation simulation = simulate_schedule(schedule);
  EXPECT_DOUBLE_EQ(simulation.bubble_time(), simulate_schedule(dual_pipe_v_schedule(2, 4)).bubble_time());
  EXPECT_DOUBLE_EQ(simulation.max_peak_memory(), 5);  // p + 1
  EXPECT_THROW(dual_pipe_schedule(3, 6), Error);
}

// Any counts, not just those that divide.
TEST(Generators, EveryTableOfSmallCountsRuns) {
  for (const std::string& name : schedule_names()) {
    const ScheduleTraits& traits = schedule_traits(name);
    for (int ranks = 1; ranks <= 6; ++ranks) {
      for (int microbatches = 1; microbatches <= 17; ++microbatches) {
        if (name == "DualPipe" && ranks % 2) continue;
        for (int v = traits.min_stages_per_rank; v <= std::min(traits.max_stages_per_rank, 3); ++v) {
          Schedule schedule = make_schedule(name, ranks, microbatches, v);
          CheckReport report = check_schedule(schedule);
          ASSERT_TRUE(report.ok()) << name << " " << ranks << " " << microbatches << " " << v << "\n" << report.text();
          EXPECT_EQ(report.weights_in_microbatch_order, name != "LoopedBFS" || microbatches == 1);
          bool splits = false;
          for (const auto& row : schedule.rows) {
            for (const Action& action : row) splits |= action.kind == ActionKind::BackwardInput;
          }
          EXPECT_TRUE(traits.splits_backward || !splits) << name;
          CheckOptions rendezvous{.blocking_sends = true, .in_order = true};
          for (const bool keep_pairs : {false, true}) {
            report = check_schedule(lower_schedule(schedule, {}, {.keep_pairs = keep_pairs}), {}, rendezvous);
            ASSERT_TRUE(report.ok()) << name << " " << ranks << " " << microbatches << " " << v << "\n"
                                     << report.text();
          }
        }
      }
    }
  }
}

// With skip connections from the first stage to all others, as the engine posts messages where values stay on devices.
TEST(Generators, EveryTableWithSkipConnectionsRunsWithRendezvousAndOneStreamARank) {
  for (const std::string& name : schedule_names()) {
    const ScheduleTraits& traits = schedule_traits(name);
    for (int ranks : {2, 4, 6}) {
      Schedule schedule = make_schedule(name, ranks, 2 * ranks + 1, traits.min_stages_per_rank);
      StageEdges edges = chain_edges(schedule.num_stages());
      for (int stage = 2; stage < schedule.num_stages(); ++stage) edges.push_back({0, stage});
      CheckReport report = check_schedule(lower_schedule(schedule, edges, {.keep_pairs = true}), edges,
                                          {.blocking_sends = true, .in_order = true});
      EXPECT_TRUE(report.ok()) << name << " " << ranks << "\n" << report.text();
    }
  }
}

Schedule any_schedule() {
  const std::string& name = schedule_names()[*rc::gen::inRange<std::size_t>(0, schedule_names().size())];
  const ScheduleTraits& traits = schedule_traits(name);
  int stages = *rc::gen::inRange(traits.min_stages_per_rank, std::min(traits.max_stages_per_rank, 4) + 1);
  int ranks = *rc::gen::inRange(1, 9);
  if (traits.bidirectional && ranks % 2) ++ranks;
  return make_schedule(name, ranks, *rc::gen::inRange(1, 33), stages);
}

TEST(Generators, AnyTableRoundTripsThroughCsv) {
  EXPECT_TRUE(rc::check([] {
    Schedule schedule = any_schedule();
    for (const Schedule& table : {schedule, lower_schedule(schedule), with_idle_ticks(schedule)}) {
      Schedule read = parse_csv(to_csv(table));
      RC_ASSERT(read.rows == table.rows);
      // The way back of a bidirectional placement shows in rows only if there is a microbatch that takes it.
      for (int s = 0; s < table.placement.num_stages(); ++s) {
        for (int m = 0; m < table.num_microbatches; ++m)
          RC_ASSERT(read.placement.rank_of(s, m) == table.placement.rank_of(s, m));
      }
      RC_ASSERT(read.num_microbatches == table.num_microbatches);
    }
  }));
}

TEST(Generators, ADroppedDuplicatedOrMisplacedActionIsAlwaysFound) {
  EXPECT_TRUE(rc::check([] {
    Schedule schedule = any_schedule();
    if (*rc::gen::arbitrary<bool>()) schedule = lower_schedule(schedule);
    std::size_t rank = *rc::gen::inRange<std::size_t>(0, schedule.rows.size());
    auto& row = schedule.rows[rank];
    auto at = static_cast<std::ptrdiff_t>(*rc::gen::inRange<std::size_t>(0, row.size()));
    Action action = row[at];
    switch (*rc::gen::inRange(0, 3)) {
      case 0: row.erase(row.begin() + at); break;
      case 1:
        row.insert(row.begin() + static_cast<std::ptrdiff_t>(*rc::gen::inRange<std::size_t>(0, row.size())), action);
        break;
      default:
        RC_PRE(schedule.rows.size() > 1);
        row.erase(row.begin() + at);
        schedule.rows[(rank + 1) % schedule.rows.size()].push_back(action);
        break;
    }
    CheckReport report = check_schedule(schedule);
    RC_ASSERT(!report.ok());
    RC_ASSERT(!report.text().empty());
  }));
}

// A swap of two actions is either harmless (the simulator runs it to its end) or named; nothing in between.
TEST(Generators, SwappedActionsEitherRunOrAreFound) {
  EXPECT_TRUE(rc::check([] {
    Schedule schedule = any_schedule();
    auto& row = schedule.rows[*rc::gen::inRange<std::size_t>(0, schedule.rows.size())];
    std::size_t a = *rc::gen::inRange<std::size_t>(0, row.size()), b = *rc::gen::inRange<std::size_t>(0, row.size());
    std::swap(row[a], row[b]);
    CheckReport report = check_schedule(schedule);
    if (report.ok()) {
      RC_ASSERT(simulate_schedule(schedule).makespan > 0);
      CheckOptions blocking;
      blocking.blocking_sends = true;
      RC_ASSERT(check_schedule(lower_schedule(schedule), {}, blocking).ok());
    } else {
      ProblemKind kind = report.problems.front().kind;
      RC_ASSERT(kind == ProblemKind::Order || kind == ProblemKind::Deadlock);
      RC_ASSERT(report.problems.front().rank >= 0);
    }
  }));
}

}  // namespace
}  // namespace plumb
