#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/line_chart.h"
#include "plumb/analysis/svg.h"
#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

// Every element is closed, in order: what an XML reader would refuse.
void expect_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  for (size_t at = 0; (at = xml.find('<', at)) != std::string::npos;) {
    const size_t end = xml.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = xml.substr(at + 1, end - at - 1);
    ASSERT_EQ(tag.find('<'), std::string::npos) << tag;
    const std::string name = tag.substr(tag[0] == '/', tag.find_first_of(" /", 1) - (tag[0] == '/'));
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty());
      ASSERT_EQ(open.back(), tag.substr(1));
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end;
  }
  EXPECT_TRUE(open.empty());
  EXPECT_THAT(xml, Not(HasSubstr("=\"nan")));
  EXPECT_THAT(xml, Not(HasSubstr("=\"inf")));
}

TEST(Svg, EscapesWhatXmlCannotHold) {
  EXPECT_EQ(svg::escaped("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&#39;");
  EXPECT_EQ(svg::escaped("µ 漢 😀"), "µ 漢 😀");
  EXPECT_EQ(svg::escaped(std::string("\x01\xff\xc3", 3)), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(svg::escaped("\xed\xa0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(svg::script_json("\"</script>\""), "\"\\u003c/script>\"");
}

TEST(Svg, TicksAreRoundAndInside) {
  EXPECT_EQ(svg::ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(svg::ticks(-0.3, 0.25, 3), (std::vector<double>{-0.2, 0, 0.2}));
  EXPECT_LE(svg::ticks(1e16, 1e16 + 2, 5).size(), 24u);
  EXPECT_EQ(svg::ticks(3, 3, 5).size(), 1u);
}

TEST(Svg, ShortensAtTheFrontBetweenCharacters) {
  EXPECT_EQ(svg::shortened("abc", 100), "abc");
  EXPECT_EQ(svg::shortened("layers.0.attn.wq", 8 * 12 * 0.58), "…attn.wq");
  EXPECT_EQ(svg::shortened("öööööö", 3 * 12 * 0.58), "…öö");
}

std::string html_of(const LineChart& chart) {
  RunColors colors;
  return to_html(chart, colors);
}

nlohmann::json data_of(const std::string& page) {
  const size_t from = page.find("json\">") + 6;
  return nlohmann::json::parse(page.substr(from, page.find("</script>", from) - from));
}

TEST(Svg, PicturesThatStandAloneKnowLightAndDark) {
  const std::string alone = svg::picture(10, 10, "", true), on_page = svg::picture(10, 10, "", false);
  EXPECT_THAT(alone, HasSubstr("@media (prefers-color-scheme:dark)"));
  EXPECT_THAT(alone, HasSubstr("fill=\"white\""));
  EXPECT_THAT(on_page, Not(HasSubstr("<style>")));
}

TEST(Svg, PacksBytes) {
  EXPECT_EQ(svg::base64(""), "");
  EXPECT_EQ(svg::base64("a"), "YQ==");
  EXPECT_EQ(svg::base64("abcd"), "YWJjZA==");
  EXPECT_EQ(svg::base64(std::string("\xff\x00\xfe", 3)), "/wD+");
}

TEST(LineChart, GivesARunTheSameColorInEveryChart) {
  RunColors colors;
  const auto one = data_of(to_html(LineChart{.curves = {{"a", {1}}, {"b", {2}}}}, colors));
  const auto two = data_of(to_html(LineChart{.curves = {{"b", {3}}, {"c", {4}}}}, colors));
  EXPECT_EQ(one["curves"][1]["color"], 1);
  EXPECT_EQ(two["curves"][0]["color"], 1);
  EXPECT_EQ(two["curves"][1]["color"], 2);
}

TEST(LineChart, ThinsLongCurves) {
  std::vector<double> values(1000000, 1);
  values[654321] = 1000;
  EXPECT_LT(html_of(LineChart{.curves = {{"a", values}}}).size(), 1u << 20);
}

TEST(LineChart, RefusesStepsThatDoNotFit) {
  EXPECT_THAT(message_of([] { html_of(LineChart{.curves = {{"a", {1, 2}, {1}}}}); }),
              HasSubstr("curve \"a\": 1 steps for 2"));
  EXPECT_THAT(message_of([] { html_of(LineChart{.curves = {{"a", {1, 2}, {2, 1}}}}); }), HasSubstr("do not ascend"));
}

TEST(LineChart, ConcludesWhereItsCurvesEnd) {
  const LineChart chart{.curves = {{"a", {5, 4, 2}}, {"b", {5, 4, 1}}, {"c", {5, 4, 1}}, {"d", {5, NAN, INFINITY}}}};
  EXPECT_EQ(
      conclusion(chart),
      "**b** ends lowest, at 1; **a** at 2 (100.0% above). **c** equals **b** at every step, bit for bit. **d** is "
      "not finite from step 1 on.");
  EXPECT_EQ(conclusion(LineChart{.curves = {{"a", {4, 3, 2, 1}}}, .smooth = 2}),
            "**a** ends at 1.5 (mean of the last 2 steps) and began at 4.");
  EXPECT_EQ(conclusion(LineChart{.curves = {{"a", {}}}}), "No run has a value.");
  EXPECT_EQ(conclusion(LineChart{.curves = {{"a", {NAN}}}}), "**a** is not finite from step 0 on.");
}

ScaleStats stats(double std) {
  return {.mean_abs = std * 0.8, .std = std, .abs_max = std * 4, .abs_min = 0, .numel = 64};
}

TEST(ScaleChart, PutsTheSameTensorOfTwoVariantsInOneRow) {
  ScaleChart chart{
      .title = "scales",
      .variants = {{"before", {{"x", "", "input", stats(1)}, {"y", "l", "aten::linear", stats(1), stats(1e-5)}}},
                   {"after", {{"x", "", "input", stats(1)}, {"new", "l", "mul"}, {"y", "l", "linear", stats(1)}}}},
      .fwd_band = band_of(FPFormat::parse("e4m3fn")),
      .bwd_band = band_of(FPFormat::parse("e5m2"))};
  const std::string picture = to_svg(chart);
  expect_well_formed(picture);
  EXPECT_EQ(count(picture, "class=\"row\""), 3u);
  // A row that only the second has stands where it stands there: before the same next row.
  EXPECT_LT(picture.find("<title>l  new"), picture.find("<title>l  y"));
  EXPECT_LT(picture.find("<title>x"), picture.find("<title>l  new"));
  EXPECT_THAT(picture, HasSubstr("Gradients"));
  EXPECT_THAT(picture, HasSubstr("e4m3fn normal"));
  chart.variants[0].rows[1].bwd.reset();
  EXPECT_THAT(to_svg(chart), Not(HasSubstr("Gradients")));
}

TEST(ScaleChart, TheSameNameTwiceInOneVariantIsTwoRows) {
  ScaleChart chart{.variants = {{"a", {{"x", "", "", stats(1)}, {"x", "", "", stats(2)}}}}};
  EXPECT_EQ(count(to_svg(chart), "class=\"row\""), 2u);
}

TEST(ScaleChart, SaysWhatAFormatDoesToATensor) {
  at::Tensor x = at::full({100}, 1.0);
  x.slice(0, 0, 25).fill_(0x1p-20);  // e4m3fn ends at 2^-9
  x.slice(0, 25, 35).fill_(0x1p-8);
  const FPFormat format = FPFormat::parse("e4m3fn");
  const ScaleStats s = scale_stats(measure(x, {.histogram = true}), &format);
  EXPECT_DOUBLE_EQ(s.underflow.value(), 0.25);
  EXPECT_DOUBLE_EQ(s.subnormal.value(), 0.10);
  EXPECT_DOUBLE_EQ(s.overflow.value(), 0.0);
  EXPECT_EQ(s.exponents, (std::vector<std::pair<int, int64_t>>{{-20, 25}, {-8, 10}, {0, 65}}));
  const std::string picture = to_svg({.variants = {{"a", {{"x", "", "", s}}}}, .fwd_band = band_of(format)});
  EXPECT_THAT(picture, HasSubstr("25.0% become 0 in e4m3fn, 10.0% lose digits"));
  EXPECT_THAT(picture, HasSubstr(">25%</text>"));
  EXPECT_FALSE(scale_stats(measure(x), &format).underflow.has_value());
}

TEST(ScaleChart, DrawsDegenerateTensors) {
  ScaleChart chart{.variants = {{"a", {}}}};
  for (const at::Tensor& x : {at::empty({0}), at::zeros({3}), at::ones({1}), at::full({2}, NAN),
                              at::full({2}, INFINITY), at::full({2}, 1e-45), at::full({2}, 1e300, at::kDouble)}) {
    const ScaleStats s = scale_stats(measure(x, {.histogram = true}));
    chart.variants[0].rows.push_back({"x", "m", "op", s, s});
  }
  const std::string picture = to_svg(chart);
  expect_well_formed(picture);
  EXPECT_EQ(count(picture, "class=\"row\""), 7u);
  EXPECT_THAT(picture, HasSubstr("all 0"));
  EXPECT_THAT(picture, HasSubstr(">NaN</text>"));
  expect_well_formed(to_svg(ScaleChart{}));
}

TEST(ScaleChart, ABarEndsAtTheLargestElement) {
  const ScaleStats s = scale_stats(measure(at::ones({64}), {.histogram = true}));
  const std::string picture = to_svg({.variants = {{"a", {{"x", "", "", s}}}}});
  const size_t bar = picture.find("stroke-width=\"5\"");
  ASSERT_NE(bar, std::string::npos);
  const size_t from = picture.find("x1=\"", bar) + 4, to = picture.find("x2=\"", bar) + 4;
  EXPECT_EQ(picture.substr(from, picture.find('"', from + 1) - from),
            picture.substr(to, picture.find('"', to + 1) - to));
}

TEST(ScaleChart, RefusesABandThatIsNoneAndAPageOfTooManyRows) {
  EXPECT_THAT(message_of([] { to_svg(ScaleChart{.fwd_band = FormatBand{"E9", 1, 0.5, 2}}); }), HasSubstr("\"E9\""));
  ScaleChart chart{.variants = {{"a", std::vector<ScaleRow>(20001)}}};
  EXPECT_THAT(message_of([&] { to_svg(chart); }), HasSubstr("20001 tensors"));
}

TEST(TimelineChart, DrawsEveryComputationOfASimulation) {
  const Schedule schedule = gpipe_schedule(2, 3);
  const TimelineRun run = timeline_of(schedule, simulate_schedule(schedule));
  EXPECT_EQ(run.actions.size(), 12u);
  EXPECT_EQ(run.num_ranks, 2);
  EXPECT_THAT(run.note, HasSubstr("bubble "));
  const std::string picture = to_svg(TimelineChart{.title = "t", .runs = {run}});
  expect_well_formed(picture);
  EXPECT_EQ(count(picture, "microbatch 2, rank 1"), 2u);
  EXPECT_THAT(picture, HasSubstr("rank 1</text>"));
}

TEST(TimelineChart, DrawsWhatWasRecordedFromItsFirstEventOn) {
  const TimelineRun run =
      timeline_of({{0, Action::forward(0, 0), 1000, 1000, 1000.001},
                   {1, Action::message(ActionKind::RecvForward, 1, 0, 0), 1000, 1000, 1000.001},
                   {1, Action::forward(1, 0), 1000, 1000.0012, 1000.002},
                   {1, Action::overlap(Action::forward(1, 1), Action::backward(1, 0)), 1000.002, 1000.002, 1000.004}});
  ASSERT_EQ(run.actions.size(), 4u);
  EXPECT_EQ(run.actions[0].start, 0);
  EXPECT_EQ(run.actions[2].half, 1);
  EXPECT_EQ(run.actions[3].half, 2);
  EXPECT_EQ(run.actions[3].kind, "B");
  const std::string picture = to_svg(TimelineChart{.runs = {run}});
  expect_well_formed(picture);
  EXPECT_THAT(picture, HasSubstr("F0: stage 1, microbatch 0, rank 1\n1.2 to 2 ms (0.8)\nwaited 1.2 ms"));
}

TEST(TimelineChart, BecomesATraceOfSeveralStepsWithNamedProcesses) {
  const TimelineRun one =
      timeline_of({{0, Action::forward(0, 0), 7, 7, 7.001}, {1, Action::forward(1, 0), 7, 7.0012, 7.002}}, "step 8");
  TimelineRun two =
      timeline_of({{1, Action::overlap(Action::forward(1, 1), Action::backward(1, 0)), 7.002, 7.002, 7.004}}, "step 9");
  const auto events = nlohmann::json::parse(to_trace({one, two}))["traceEvents"];
  std::vector<std::string> processes, steps, ran, waits;
  for (const auto& e : events) {
    if (e["name"] == "process_name") processes.push_back(e["args"]["name"].get<std::string>());
    if (e["ph"] != "X") continue;
    (e["pid"] == 1 ? steps : e["cat"] == "wait" ? waits : ran).push_back(e["name"].get<std::string>());
  }
  EXPECT_EQ(processes, (std::vector<std::string>{"steps", "rank 0, stage 0", "rank 1, stage 1"}));
  EXPECT_EQ(steps, (std::vector<std::string>{"step 8", "step 9"}));
  EXPECT_EQ(ran, (std::vector<std::string>{"0F0", "1F0", "1F1", "1B0"}));
  EXPECT_EQ(waits, (std::vector<std::string>{"wait for 1F0"}));
  std::map<int, int> process_of;  // Perfetto joins threads of one number, and those of number 0
  for (const auto& e : events) {
    const int thread = e["tid"], process = e["pid"];
    EXPECT_GT(std::min(thread, process), 0);
    EXPECT_EQ(process_of.emplace(thread, process).first->second, process) << e;
  }
}

TEST(TimelineChart, SaysWhatTheBubbleIsMadeOf) {
  // Two stages, of which the second takes twice as long, and a message that is waited for.
  const Schedule schedule = gpipe_schedule(2, 2);
  const Simulation run = simulate_schedule(schedule, Costs{.forward = {1, 2}, .input = {1, 2}, .weight = {1, 2}});
  std::vector<TimelineEvent> events;
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const Span& span = run.spans[rank][i];
      if (!schedule.rows[rank][i].is_compute()) continue;
      events.push_back({static_cast<int>(rank), schedule.rows[rank][i], span.start, span.start, span.end});
    }
  }
  const MeasuredStep exact = measured_step(schedule, events);
  ASSERT_EQ(exact.chart.runs.size(), 3u);
  EXPECT_NEAR(exact.bubble, run.bubble_rate(), 1e-9);
  EXPECT_THAT(exact.conclusion, HasSubstr("compute nothing for " + percent(exact.bubble)));
  EXPECT_THAT(exact.conclusion, HasSubstr("That stages differ (stage 1 takes 1.33 times the mean) adds "));
  EXPECT_THAT(exact.conclusion, HasSubstr("Messages and uneven actions add nothing"));
  for (TimelineEvent& e : events) {
    const double late = e.rank == 1 ? 3 : e.action.kind == ActionKind::Forward ? 0 : 6;
    e.start += late, e.end += late;
  }
  EXPECT_THAT(measured_step(schedule, events).conclusion, HasSubstr("are waiting for messages"));
}

TEST(TimelineChart, RefusesWhatIsNoTimeLine) {
  auto with = [](TimelineAction action) {
    return message_of([&] { to_svg(TimelineChart{.runs = {{"real", "s", {action}}}}); });
  };
  EXPECT_THAT(with({.kind = "F", .start = 2, .end = 1}),
              HasSubstr("time line \"real\": action F of stage 0 runs from 2 to 1"));
  EXPECT_THAT(with({.kind = "F", .start = NAN, .end = 1}), HasSubstr("runs from nan"));
  EXPECT_THAT(with({.rank = -1, .kind = "F", .start = 0, .end = 1}), HasSubstr("rank -1"));
  EXPECT_THAT(with({.rank = 1 << 30, .kind = "F", .start = 0, .end = 1}), HasSubstr("ranks are more"));
  EXPECT_EQ(with({.kind = "F", .start = 1, .end = 1}), "no error");
  EXPECT_THAT(message_of([] { timeline_of(gpipe_schedule(2, 2), Simulation{}); }), HasSubstr("not of schedule"));
}

}  // namespace
}  // namespace plumb
