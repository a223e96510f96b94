#include "plumb/schedule/liveness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

// Returns "stage.microbatch: forward-release slot" for every activation.
std::string text(const PipelineActivationLiveness& found) {
  std::string all;
  for (const auto& [at, life] : found.lives) {
    all += std::to_string(at.first) + '.' + std::to_string(at.second) + ": " + std::to_string(life.forward) + '-' +
           std::to_string(life.release) + ' ' + std::to_string(life.slot) + '\n';
  }
  return all;
}

TEST(Liveness, ASlotIsTakenAgainAfterTheHalfForTheWeights) {
  const Schedule schedule = parse_csv("0F0,1F0,1I0,0I0,0F1,1F1,1W0,0W0,0F2,1B1,0B1,1F2,1B2,0B2\n");
  const auto apart = analyze_pipeline_activation_liveness(schedule, 0, {0, 1}, false);
  EXPECT_EQ(text(apart), "0.0: 0-7 0\n0.1: 4-10 2\n0.2: 8-13 0\n1.0: 1-6 1\n1.1: 5-9 3\n1.2: 11-12 1\n");
  EXPECT_EQ(apart.num_slots, 4);
  const auto whole = analyze_pipeline_activation_liveness(schedule, 0, {0, 1}, true);
  EXPECT_EQ(text(whole), "0.0: 0-7 0\n0.1: 4-10 1\n0.2: 8-13 0\n1.0: 0-7 0\n1.1: 4-10 1\n1.2: 8-13 0\n");
  EXPECT_EQ(whole.num_slots, 2);
}

TEST(Liveness, OneForwardOneBackwardHoldsAsManyAsRanksAreLeft) {
  const Schedule schedule = one_f_one_b_schedule(4, 8);
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(analyze_pipeline_activation_liveness(schedule, rank, {rank}, false).num_slots, 4 - rank);
}

TEST(Liveness, NamesWhatTheTableDoesNotHave) {
  const auto message = [](const char* table, int rank, const std::vector<int>& stages) -> std::string {
    try {
      analyze_pipeline_activation_liveness(parse_csv(table), rank, stages, false);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message("0F0,0B0\n", 1, {0}), HasSubstr("no rank 1 among 1"));
  EXPECT_THAT(message("0F0,0B0\n", 0, {}), HasSubstr("at least one"));
  EXPECT_THAT(message("0F0,0B0\n1F0,1B0\n", 0, {1}), HasSubstr("stage 1 is not run on rank 0"));
  EXPECT_THAT(message("0F0,0I0\n", 0, {0}), HasSubstr("stage 0, microbatch 0 has no forward"));
  EXPECT_THAT(message("0B0,0F0\n", 0, {0}), HasSubstr("stage 0, microbatch 0 has no forward"));
  EXPECT_THAT(message("0F0,0F0,0B0\n", 0, {0}), HasSubstr("0F0 stands twice on rank 0"));
}

}  // namespace
}  // namespace plumb
