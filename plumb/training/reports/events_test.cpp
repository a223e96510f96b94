#include "plumb/training/reports/events.h"

#include <gtest/gtest.h>

#include <set>

namespace plumb {
namespace {

template <class... Event>
std::vector<TrainEvent> one_of_each(const std::variant<Event...>*) {
  return {TrainEvent(Event())...};
}

TEST(Events, ComeBackFromTheirJsonWhateverTheirKind) {
  std::set<std::string_view> kinds;
  for (const TrainEvent& event : one_of_each(static_cast<const TrainEvent*>(nullptr))) {
    EXPECT_TRUE(kinds.insert(kind_of(event)).second) << kind_of(event);
    const std::string text = to_json(event).dump();
    const auto read = event_from_json(nlohmann::json::parse(text));
    ASSERT_TRUE(read) << text;
    EXPECT_EQ(read->index(), event.index()) << text;
    EXPECT_EQ(to_json(*read).dump(), text);
  }
}

TEST(Events, KeepTheirFieldsAndLeaveOutWhatIsNotThere) {
  const event::Stepped step{3, 10, 0.5, 1e-3, 2, 8, std::nullopt, 1e6, 1.25};
  EXPECT_EQ(to_json(step), nlohmann::json::parse(R"({"step": 3, "steps": 10, "loss": 0.5, "lr": 1e-3, "norm": 2.0,
      "rows": 8, "memory": 1e6, "seconds": 1.25})"));
  const auto read = event_from_json(to_json(event::Resumed{4, 9, "run"}));
  const auto& resumed = std::get<event::Resumed>(read.value());
  EXPECT_EQ(resumed.step, 4);
  EXPECT_EQ(resumed.steps, 9);
  EXPECT_EQ(resumed.folder, "run");
}

TEST(Events, NumbersThatAreNotFiniteAreNullInJson) {
  event::Stepped step;
  step.loss = INFINITY;
  const auto line = nlohmann::json::parse(to_json(step).dump());
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(std::isnan(std::get<event::Stepped>(event_from_json(line).value()).loss));
}

TEST(Events, OtherLinesAreNoEvents) {
  for (const char* line : {"null", "3", "[]", "{}", R"({"step": 1})", R"({"saved": 3})", R"({"other": "saved"})"})
    EXPECT_FALSE(event_from_json(nlohmann::json::parse(line))) << line;
}

}  // namespace
}  // namespace plumb
