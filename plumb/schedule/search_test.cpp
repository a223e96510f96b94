#include "plumb/schedule/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

// Measured costs of the Zero Bubble paper (arXiv 2401.10241), to the three digits that its authors' script for its
// bubble rates takes, the models' widths and heads, and the rates of its own searched schedules.
struct Measured {
  double forward, input, weight, communication;
  int ranks;
  double width, heads;
  double rate_1p, rate_2p;
};
constexpr Measured kMeasured[] = {{18.522, 18.086, 9.337, 0.601, 8, 2304, 24, .1585, .0433},
                                  {29.718, 29.444, 19.927, 0.527, 8, 4096, 32, .1323, .0029},
                                  {11.347, 11.248, 8.132, 0.377, 16, 5120, 40, .1397, .0066},
                                  {10.419, 10.207, 7.715, 0.408, 32, 6144, 48, .1421, .0038}};

// Half a unit of the last digit the paper prints.
constexpr double kPrinted = 5e-5;

// The paper's memory (its table 1): of a layer's 34 h + 5 a s activations the weight backward needs 32 h; s = 1,024.
double held_for_weight(const Measured& m) { return 32 * m.width / (34 * m.width + 5 * m.heads * 1024); }

Costs costs_of(const Measured& measured) {
  Costs costs;
  costs.forward = {measured.forward};
  costs.input = {measured.input};
  costs.weight = {measured.weight};
  costs.communication = {measured.communication};
  costs.held_for_weight = {held_for_weight(measured)};
  return costs;
}

void expect_within(const SearchResult& result, double limit, const Costs& costs) {
  CheckOptions options;
  options.memory_limit = limit;
  options.memory = costs;
  CheckReport report = check_schedule(result.schedule, {}, options);
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_TRUE(report.weights_in_microbatch_order);
}

TEST(Search, ReachesThePaperWithinTwiceTheMemoryOf1F1B) {
  constexpr double kEffort[] = {1e7, 1e7, 1e7, 1e8};
  for (int i = 0; i < 4; ++i) {
    const Measured& measured = kMeasured[i];
    Costs costs = costs_of(measured);
    SearchResult result = search_schedule(measured.ranks, 3 * measured.ranks, costs,
                                          {.memory_limit = 2.0 * measured.ranks, .effort = kEffort[i]});
    EXPECT_LE(result.simulation.zero_bubble_rate(), measured.rate_2p + kPrinted) << measured.ranks;
    expect_within(result, 2.0 * measured.ranks, costs);
  }
}

// A rank of p microbatches cannot begin its last forward before it has run enough backwards to make room, nor end its
// step before that microbatch has gone all the way and back.
double least_rate_within_1f1b(const Measured& measured) {
  int p = measured.ranks, n = 3 * p;
  double way = measured.forward + measured.input + 2 * measured.communication;
  double idle = (p - 1) * (measured.input + 2 * measured.communication);  // first input backward, less p forwards
  double least = std::numeric_limits<double>::infinity();
  for (int flying = 1; flying <= p; ++flying) {
    int held = static_cast<int>((p - flying) / held_for_weight(measured) + 1e-9);
    least = std::min(least, (n - flying) * measured.input + std::max(0, n - flying - held) * measured.weight);
  }
  double step = idle + n * measured.forward + least + (p - 1) * way + measured.input + measured.weight;
  return 1 - n * (measured.forward + measured.input + measured.weight) / step;
}

TEST(Search, ReachesThePaperWithinTheMemoryOf1F1B) {
  for (const Measured& measured : kMeasured) {
    Costs costs = costs_of(measured);
    SearchResult result = search_schedule(measured.ranks, 3 * measured.ranks, costs,
                                          {.memory_limit = 1.0 * measured.ranks, .effort = 2e6});
    EXPECT_LE(result.simulation.zero_bubble_rate(), measured.rate_1p + kPrinted) << measured.ranks;
    EXPECT_GE(result.simulation.zero_bubble_rate(), least_rate_within_1f1b(measured) - 1e-9) << measured.ranks;
    expect_within(result, measured.ranks, costs);
  }
}

// The bound meets the paper's figures to their last digit, so its memory is the one assumed here; and costs rounded to
// two digits (.38 and .43 for the messages of the last two) cannot give them.
TEST(Search, CannotDoBetterThanThePaperWithinTheMemoryOf1F1B) {
  for (const Measured& measured : kMeasured) {
    EXPECT_NEAR(least_rate_within_1f1b(measured), measured.rate_1p, kPrinted) << measured.ranks;
  }
  const Measured rounded[] = {{11.35, 11.25, 8.13, 0.38, 16, 5120, 40}, {10.42, 10.20, 7.71, 0.43, 32, 6144, 48}};
  EXPECT_GT(least_rate_within_1f1b(rounded[0]), .1397 + kPrinted);
  EXPECT_GT(least_rate_within_1f1b(rounded[1]), .1421 + kPrinted);
}

TEST(Search, IsNeverWorseThanZbH1InItsMemoryWhateverTheCosts) {
  for (auto [f, i, w] : {std::tuple{1.0, 1.0, 1.0}, {3.0, 1.0, 2.0}, {1.0, 4.0, 0.5}}) {
    Costs costs;
    costs.forward = {f};
    costs.input = {i};
    costs.weight = {w};
    SearchResult result = search_schedule(4, 12, costs, {.memory_limit = 4, .effort = 1e6});
    EXPECT_LE(result.simulation.zero_bubble_rate(),
              simulate_schedule(zb_h1_schedule(4, 12), costs).zero_bubble_rate() + 1e-9);
    expect_within(result, 4, costs);
  }
}

TEST(Search, IsTheSameEveryTime) {
  Costs costs = costs_of(kMeasured[0]);
  SearchOptions options{.memory_limit = 12, .effort = 5e5, .seed = 7};
  EXPECT_EQ(search_schedule(8, 24, costs, options).schedule, search_schedule(8, 24, costs, options).schedule);
}

TEST(Search, TakesUnevenStagesAndSmallCounts) {
  Costs costs;
  costs.forward = {1, 2, 3};
  costs.input = {3, 2, 1};
  costs.weight = {1, 1, 5};
  for (int microbatches : {1, 2, 5}) {
    SearchResult result = search_schedule(3, microbatches, costs, {.memory_limit = 1, .effort = 1e5});
    expect_within(result, 1, costs);
    EXPECT_LE(result.simulation.max_peak_memory(), 1);
  }
  EXPECT_EQ(search_schedule(1, 1, {}).simulation.makespan, 3);
}

TEST(Search, RefusesALimitUnderOneMicrobatch) {
  EXPECT_THROW(search_schedule(4, 8, {}, {.memory_limit = 0.5}), Error);
  EXPECT_THROW(search_schedule(0, 8, {}), Error);
  EXPECT_THROW(search_schedule(2, 8, {.forward = {1, 2, 3}}), Error);
}

}  // namespace
}  // namespace plumb
