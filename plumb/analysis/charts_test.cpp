#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

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

TEST(LineChart, DrawsACurveForEveryCurve) {
  const std::string picture = to_svg(LineChart{.title = "loss", .curves = {{"a", {3, 2, 1}}, {"b", {3, 2.5, 2}}}});
  expect_well_formed(picture);
  EXPECT_EQ(count(picture, "class=\"curve"), 2u);
  EXPECT_EQ(count(picture, "class=\"legend"), 2u);
  EXPECT_THAT(picture, HasSubstr("fill=\"white\""));
}

TEST(LineChart, BreaksAtNaNAndMarksWhereACurveIsLost) {
  const std::string gap = to_svg(LineChart{.curves = {{"a", {1, 2, NAN, 3, 4}}}});
  EXPECT_EQ(count(gap, "M") - count(gap, "Menlo"), 2u);
  EXPECT_THAT(gap, Not(HasSubstr("not finite")));
  const std::string lost = to_svg(LineChart{.curves = {{"a", {1, 2, 3, INFINITY, NAN}, {0, 10, 20, 30, 40}}}});
  expect_well_formed(lost);
  EXPECT_THAT(lost, HasSubstr("a: not finite from step 30 on"));
}

TEST(LineChart, DrawsDegenerateData) {
  for (bool log : {false, true}) {
    for (const std::vector<double>& values : std::vector<std::vector<double>>{
             {}, {1}, {NAN}, {0, 0}, {-1, -2}, {5, 5, 5}, {1e-300, 1e300}, {1e300, -1e300}, {INFINITY}}) {
      expect_well_formed(to_svg(LineChart{.curves = {{"a", values}}, .log_y = log}));
    }
  }
  expect_well_formed(to_svg(LineChart{}));
}

TEST(LineChart, ThinsLongCurvesButKeepsPeaks) {
  std::vector<double> values(1000000, 1);
  values[654321] = 1000;
  const std::string page = to_html(LineChart{.curves = {{"a", values}}});
  EXPECT_LT(page.size(), 300000u);
  EXPECT_THAT(page, HasSubstr("1000.0"));
}

TEST(LineChart, SmoothsWithTheMeanOfTheLastValues) {
  const std::string page = to_html(LineChart{.curves = {{"a", {1, 3, 5, 7}}}, .smooth = 2});
  EXPECT_THAT(page, HasSubstr("\"y\":[1.0,2.0,4.0,6.0]"));
}

TEST(LineChart, RefusesStepsThatDoNotFit) {
  EXPECT_THAT(message_of([] { to_svg(LineChart{.curves = {{"a", {1, 2}, {1}}}}); }),
              HasSubstr("curve \"a\": 1 steps for 2"));
  EXPECT_THAT(message_of([] { to_svg(LineChart{.curves = {{"a", {1, 2}, {2, 1}}}}); }), HasSubstr("do not ascend"));
  EXPECT_THAT(message_of([] { to_svg(LineChart{.log_y = true, .y_min = 0}); }), HasSubstr("limit of the y axis"));
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
  // What only the second has stands before what it stands before there.
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
  EXPECT_THAT(run.note, HasSubstr("idle "));
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
