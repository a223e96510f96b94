// Plan files: what is written is read again, and no bytes do harm.
#include "plumb/schedule/pipeline_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

PipelinePlan example() {
  const Schedule schedule = zbv_schedule(2, 4);
  return {.cut = {"addmm_1", "gelu", "addmm_3"},
          .schedule = schedule,
          .recompute = {"cheap", "none", "cheap", "cheap"},
          .transmit = {"table.weight"},
          .replicas = 2,
          .seconds = 0.25,
          .memory = {1e6, 2e6},
          .operators = 12};
}

std::string changed(const char* entry, const nlohmann::json& value) {
  nlohmann::json document = nlohmann::json::parse(to_json(example()));
  document[entry] = value;
  return document.dump();
}

TEST(PipelinePlan, IsReadAgainAsItWasWritten) { EXPECT_EQ(parse_plan(to_json(example())), example()); }

TEST(PipelinePlan, OfAnOlderVersionIsForAGraphOfAnySize) {
  nlohmann::json document = nlohmann::json::parse(to_json(example()));
  document.erase("operators");
  document.erase("transmit");
  EXPECT_EQ(parse_plan(document.dump()).operators, 0);
  EXPECT_TRUE(parse_plan(document.dump()).transmit.empty());
}

TEST(PipelinePlan, IsNotWrittenWithWhatJsonCannotHold) {
  PipelinePlan plan = example();
  plan.memory[1] = INFINITY;
  EXPECT_THAT(message_of([&] { to_json(plan); }), HasSubstr("are not finite"));
  plan = example();
  plan.cut[0] = "addmm\xff";
  EXPECT_THAT(message_of([&] { to_json(plan); }), HasSubstr("no UTF-8"));
}

TEST(PipelinePlan, SaysWhichEntryIsWrong) {
  const auto problem = [](const std::string& text) { return message_of([&] { parse_plan(text, "best.json"); }); };
  EXPECT_THAT(problem("{"), HasSubstr("is no plan of plumb: is not JSON: parse error at line 1, column 2"));
  EXPECT_THAT(problem("[1]"), HasSubstr("is no plan of plumb"));
  EXPECT_THAT(problem("{}"), HasSubstr("'plumb_plan' is missing"));
  EXPECT_THAT(problem(changed("plumb_plan", "1")), HasSubstr("'plumb_plan'"));
  EXPECT_THAT(problem(changed("plumb_plan", 2)), HasSubstr("a newer plumb"));
  EXPECT_THAT(problem(R"({"replicas": 2, )" + to_json(example()).substr(1)), HasSubstr("has 'replicas' twice"));
  EXPECT_THAT(problem(changed("ranks", 3)), HasSubstr("2 rows for 3 ranks"));
  EXPECT_THAT(problem(changed("ranks", 1e9)), HasSubstr("'ranks'"));
  EXPECT_THAT(problem(changed("microbatches", 5)), HasSubstr("4 microbatches"));
  EXPECT_THAT(problem(changed("replicas", 0)), HasSubstr("'replicas'"));
  EXPECT_THAT(problem(changed("cut", {"a"})), HasSubstr("'cut' 2"));
  EXPECT_THAT(problem(changed("cut", {1, 2, 3})), HasSubstr("'cut' holds what is no text"));
  EXPECT_THAT(problem(changed("transmit", "all")), HasSubstr("'transmit' is no list"));
  EXPECT_THAT(problem(changed("recompute", {"cheap", "all", "cheap", "cheap"})), HasSubstr("neither cheap nor none"));
  EXPECT_THAT(problem(changed("operators", -1)), HasSubstr("'operators'"));
  EXPECT_THAT(problem(changed("memory", {-1})), HasSubstr("'memory'"));
  EXPECT_THAT(problem(changed("seconds", "soon")), HasSubstr("'seconds'"));
  EXPECT_THAT(problem(changed("table", {"0F0\n1F0", "1F0"})), HasSubstr("more than actions"));
  EXPECT_THAT(problem(changed("table", {"0F999999999", ""})), HasSubstr("names number 999999999"));
  nlohmann::json table = nlohmann::json::parse(to_json(example()))["table"];
  table[0] = table[0].get<std::string>() + ",0F0";
  EXPECT_THAT(problem(changed("table", table)), testing::AllOf(HasSubstr("cannot run"), HasSubstr("at: best.json")));
  EXPECT_THAT(problem(std::string(5000, '[')), HasSubstr("is no plan of plumb"));
}

}  // namespace
}  // namespace plumb
