#include "plumb/analysis/history_view.h"

#include <gmock/gmock.h>

#include <cmath>

#include "plumb/analysis/browser_testing.h"
#include "plumb/analysis/history_testing.h"
#include "plumb/analysis/html_report.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string html_of(const HistoryView& view) {
  RunColors colors;
  return to_html(view, colors);
}

std::vector<FPFormat> formats() { return {FPFormat::parse("e4m3fn"), FPFormat::parse("e5m2")}; }

TEST(HistoryView, AnswersWhatEachFormatWouldDoToAGradient) {
  HistoryView view{"", {{"run", made(2, 20, 0, 0)}}, formats(), {FPFormat::parse("e4m3fn")}};
  const Table first = format_table(view, 1), last = format_table(view);
  ASSERT_EQ(first.rows.size(), 4u);
  EXPECT_EQ(first.header[3], "format");
  EXPECT_EQ(first.header[4], "becomes 0");
  const auto& worst = last.rows[0];
  EXPECT_EQ(worst[2], "gradient");
  // A gradient against the format of gradients, and what else is asked for beside it.
  EXPECT_EQ(worst[3], "e5m2");
  const size_t t = worst[0] == "layers.0.y_0" ? 0 : 1;
  const TensorMetrics m = view.runs[0].history.steps.back().rows[2 * t + 1].data.full();
  EXPECT_EQ(worst[4], percent(m.underflow_share(view.formats[1])));
  EXPECT_EQ(last.header[7], "e4m3fn to 0");
  EXPECT_GT(std::stod(worst[7]), 90);  // E4M3 ends 2^7 above E5M2
  EXPECT_LT(std::stod(first.rows[0][4]), 1);
  EXPECT_EQ(format_table(view, 0, 3).rows.size(), 3u);
}

TEST(HistoryView, SaysNothingOfWhatWasNotMeasured) {
  HistoryView view{"", {{"run", made(2, 20, 0, 0)}}, formats()};
  EXPECT_FALSE(format_table(view).rows.empty());
  for (HistoryStep& step : view.runs[0].history.steps) {
    for (HistoryRow& row : step.rows) {
      row.present = 1u << static_cast<unsigned>(StatisticKind::Histogram);  // as older versions recorded it alone
      row.data.numel = 0;
    }
  }
  EXPECT_TRUE(format_table(view).rows.empty());
  EXPECT_EQ(conclusion(view), "What formats lose was not recorded: that takes histograms.");
  const ScaleChart chart = scale_chart(view);
  EXPECT_FALSE(chart.variants[0].rows[0].bwd->underflow);
  EXPECT_TRUE(std::isnan(chart.variants[0].rows[0].bwd->std));
  EXPECT_THAT(to_svg(chart), Not(HasSubstr("nan")));
}

TEST(HistoryView, ListsTheStatisticsThatWereRecorded) {
  HistoryView view{"", {{"run", made(2, 20, 0, 0)}}, formats()};
  for (HistoryStep& step : view.runs[0].history.steps) {
    for (HistoryRow& row : step.rows) {
      row.present = 1u << static_cast<unsigned>(row.backward ? StatisticKind::AbsMax : StatisticKind::Std);
      row.data.std = 0.25 * (row.tensor + 1), row.data.abs_max = 3;
    }
  }
  const Table table = statistics_table(view, 1);
  EXPECT_EQ(table.header, (std::vector<std::string>{"tensor", "operator", "of", "std", "abs_max"}));
  ASSERT_EQ(table.rows.size(), 4u);
  EXPECT_EQ(table.rows[2][0], "layers.0.y_1");
  EXPECT_EQ(table.rows[2][3], "0.5");
  EXPECT_EQ(table.rows[2][4], "");
  EXPECT_EQ(table.rows[3][4], "3");
}

TEST(HistoryView, DrawsAStepAsAPictureForPapers) {
  HistoryView view{"scales", {{"plain", made(5, 3, 0, -8)}, {"scaled", made(6, 2, 0, 0)}}, formats()};
  const ScaleChart chart = scale_chart(view, 11);
  ASSERT_EQ(chart.variants.size(), 2u);
  EXPECT_EQ(chart.variants[0].rows.size(), 5u);
  EXPECT_DOUBLE_EQ(chart.variants[0].rows[0].bwd->std, 0x1p-9);
  EXPECT_EQ(chart.variants[0].rows[0].name, "y_0");
  EXPECT_EQ(chart.variants[0].rows[0].module_path, "layers.0");
  EXPECT_THAT(to_svg(chart), HasSubstr("e5m2 normal"));
  EXPECT_DOUBLE_EQ(scale_chart(view).variants[0].rows[0].bwd->std, 0x1p-10);
  EXPECT_THROW(scale_chart(HistoryView{"", {{"a", History{}}}}, 1), Error);
  History of_nothing;  // as a model without tensors has it
  of_nothing.steps.push_back({1, {}});
  const HistoryView nothing{"", {{"a", of_nothing}}};
  EXPECT_THAT(to_svg(scale_chart(nothing)), HasSubstr("</svg>"));
}

TEST(HistoryView, NamesTheRankAndStageOfATensorWhereTheyAreKnown) {
  HistoryView view{"", {{"run", made(2, 1, 0, 0)}}, formats()};
  EXPECT_THAT(html_of(view), Not(HasSubstr("rank")));
  view.runs[0].history.tensors[1].stage = 1;
  view.runs[0].history.tensors[1].rank = 3;
  view.runs[0].history.events.push_back({1, 0, "std > 0", 1, {{1, false, 5}}});
  const Table table = format_table(view);
  EXPECT_EQ(table.header[2], "part");
  for (const auto& row : table.rows) EXPECT_EQ(row[2], row[0] == "layers.0.y_1" ? "stage 1, rank 3" : "");
  EXPECT_EQ(event_table(view).rows[0][4], "layers.0.y_1 of stage 1, rank 3: 5");
  EXPECT_THAT(html_of(view), HasSubstr("stage 1, rank 3"));
}

TEST(HistoryView, DrawsNoRangeWhereEveryBlockHasItsOwn) {
  HistoryView view{"", {{"run", made(2, 1, 0, 0)}}, {FPFormat::parse("mxfp8"), FPFormat::parse("e5m2")}};
  const ScaleChart chart = scale_chart(view);
  EXPECT_FALSE(chart.fwd_band.has_value());
  EXPECT_TRUE(chart.bwd_band.has_value());
  EXPECT_NO_THROW(to_svg(chart));
  EXPECT_THAT(html_of(view), HasSubstr("{\"name\":\"mxfp8e4m3\"}"));
  for (const auto& row : format_table(view).rows) EXPECT_EQ(row[3], row[2] == "value" ? "mxfp8e4m3" : "e5m2");
}

TEST(HistoryView, ScalarsBecomeChartsAndEventsATable) {
  HistoryView view{"", {{"a", made(1, 3, 0, 0)}, {"b", made(1, 2, 0, 0)}}, {}};
  view.runs[0].history.scalars.push_back({11, {{"loss", 9.0}}});  // written again after a crash
  view.runs[0].history.events.push_back({21, 0, "nan_count > 0", 3, {{0, true, 5}}});
  const auto charts = scalar_charts(view);
  ASSERT_EQ(charts.size(), 1u);
  ASSERT_EQ(charts[0].curves.size(), 2u);
  EXPECT_EQ(charts[0].curves[0].steps, (std::vector<double>{1, 11}));
  EXPECT_EQ(charts[0].curves[0].values[1], 9.0);
  EXPECT_EQ(event_table(view).rows,
            (std::vector<std::vector<std::string>>{{"a", "21", "nan_count > 0", "3", "layers.0.y_0 (gradient): 5"}}));
}

TEST(HistoryView, RollsUpByLayerTheWorstFirst) {
  EXPECT_EQ(layer_of("transformer.h.11.attn.c_attn"), "transformer.h.11");
  EXPECT_EQ(layer_of("head.linear1"), "head.linear1");
  EXPECT_EQ(layer_of(""), "");
  HistoryView view{"", {{"run", made(8, 1, 0, 0)}}, formats()};
  // One gradient of the second layer is far below the format, and a value is worse still: it is not finite.
  auto& rows = view.runs[0].history.steps[0].rows;
  auto histogram = std::make_shared<ExponentHistogram>();
  histogram->counts[127 - 40] = 4096;
  rows[2 * 5 + 1].data.histogram = histogram;
  const Table table = layer_table(view);
  ASSERT_GE(table.rows.size(), 4u);
  EXPECT_EQ(table.rows[0][0], "layers.1");
  EXPECT_EQ(table.rows[0][1], "1 of 8");
  EXPECT_EQ(table.rows[1][0], "layers.1.y_5");
  EXPECT_EQ(table.rows[1][3], "gradient");
  EXPECT_EQ(table.levels[0], 0);
  EXPECT_EQ(table.levels[1], 1);
  EXPECT_EQ(std::count(table.levels.begin(), table.levels.end(), 0), 2);
  EXPECT_EQ(conclusion(view),
            "What loses 1 % or more of its elements in e4m3fn (values) or e5m2 (gradients): **1 of 8** tensors. The "
            "worst is the gradient of `layers.1.y_5`: 100.0% of it becomes 0 and 0.0% is too large.");
  rows[0].data.nan_count = 1;
  EXPECT_THAT(conclusion(view), HasSubstr("value of `layers.0.y_0`: it has NaN or infinities"));
}

TEST(HistoryView, ConcludesForEveryRunAtItsFirstAndLastStep) {
  HistoryView view{"", {{"plain", made(4, 20, 0, 0)}, {"scaled", made(4, 20, 0, 8)}}, formats()};
  EXPECT_THAT(conclusion(view), HasSubstr("**4 of 4** tensors in **plain**, **"));
  EXPECT_THAT(conclusion(view), HasSubstr(" at step 191, and 0 of 4 tensors in plain, 0 of 4 in scaled at step 1."));
  for (HistoryStep& step : view.runs[0].history.steps) {
    for (HistoryRow& row : step.rows) row.data.histogram.reset();
  }
  view.runs.pop_back();
  EXPECT_EQ(conclusion(view), "What formats lose was not recorded: that takes histograms.");
}

TEST(HistoryView, RefusesWhatItCannotShow) {
  EXPECT_THROW(html_of(HistoryView{}), Error);
  EXPECT_THROW(html_of(HistoryView{"", {{"a", History{}}}}), Error);
  const HistoryRun run{"a", made(1, 1, 0, 0)};
  EXPECT_THROW(html_of(HistoryView{"", std::vector<HistoryRun>(9, run)}), Error);
  EXPECT_NO_THROW(html_of(HistoryView{"", {run}}));
}

TEST(HistoryView, EscapesNamesAndThinsLongHistories) {
  HistoryView view{"</script><b>", {{"<b>", made(4, 200, 0, 0)}}, formats()};
  view.runs[0].history.tensors[0].name = "</script><script>alert(1)</script>";
  view.max_bytes = 20000;
  const std::string html = html_of(view);
  EXPECT_THAT(html, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(html, Not(HasSubstr("<b>")));
  EXPECT_THAT(html, HasSubstr("of 200 recorded steps"));
  EXPECT_LT(html.size(), 60000u);
}

// A reader's actions, by script; results as attributes of the body.
constexpr const char* kReader = R"(<script>
const d = document, out = d.body.dataset, one = (s, of = d) => of.querySelector(s), all = (s, of = d) => [...of.querySelectorAll(s)];
const names = () => all(".history-space .row").slice(0, 3).map(r => r.dataset.tensor).join();
const slider = one(".stepper input"), scroll = one(".history-scroll"), count = () => one(".count").textContent;
out.count = count(); out.drawn = all(".history-space .row").length; out.first = names(); out.step = one("output").textContent;
const head = k => one(`.history-head button[data-sort="${k}"]`), click = k => head(k)?.dispatchEvent(new MouseEvent("click", {bubbles: true}));
click("gradients: std"); out.down = names(); out.sorted = head("gradients: std")?.getAttribute("aria-sort");
click("gradients: std"); out.up = names();
click("tensor"); out.order = names();
one('.history-space .row[data-tensor="1"]').dispatchEvent(new MouseEvent("click", {bubbles: true}));
const gradient = () => all(".detail tbody tr").find(r => r.cells[1].textContent === "gradient").cells;
out.detail = one(".detail h4").textContent; out.pictures = all(".detail .panels > div").length;
out.layers = all(".layers h4").map(h => h.textContent).join(); out.courses = all(".layers .curve").length;
const which = one(".layer-which"); which.value = "gradients"; which.onchange(); out.curves = all(".layers .curve").length; out.last = gradient()[4].textContent;
out.formats = all(".detail table")[1].tBodies[0].rows.length;
slider.value = 0; slider.oninput(); out.moved = one("output").textContent; out.then = gradient()[4].textContent;
const shareOf = () => all(".detail table")[1].tBodies[0].rows[3].cells[3].textContent;
out.share = shareOf(); slider.value = slider.max; slider.oninput(); out.later = shareOf();
const search = one("input[type=search]"); search.value = "layers.1 GELU"; search.oninput(); out.found = count();
search.value = ""; search.oninput();
const lossy = one(".lossy input"); lossy.checked = true; lossy.onchange(); out.lossy = count(); lossy.checked = false; lossy.onchange();
const bands = all(".history-space .band-normal").map(r => r.getAttribute("width")).join();
const select = one(".of-bwd"); select.selectedIndex = 0; select.onchange();
out.bands = bands === all(".history-space .band-normal").map(r => r.getAttribute("width")).join() ? "same" : "other";
scroll.scrollTop = 1e9; scroll.dispatchEvent(new Event("scroll")); out.bottom = all(".history-space .row").pop().dataset.tensor;
out.colors = [...new Set(all(".history-space .row g").map(g => g.getAttribute("class")))].sort().join();
out.wide = document.documentElement.scrollWidth <= innerWidth ? "fits" : "overflows";
out.side = one(".side").parentNode.hidden ? "both" : "one"; out.heads = all(".history-head button").length;
</script>)";

std::string page_of(const HistoryView& view) {
  HtmlReport report("Scales");
  report.section("History").add(view);
  for (const LineChart& chart : scalar_charts(view)) report.add(chart);
  std::string page = report.add(format_table(view, 0, 50)).html();
  page.insert(page.rfind("</body>"), kReader);
  return page;
}

TEST_F(Browser, SlidesSortsAndOpensAHistoryOfTwoRuns) {
  const std::string body = body_tag(
      open(page_of({"two", {{"plain", made(8, 12, 0, -4)}, {"scaled", made(8, 12, 0, 0, "plumb::linear")}}, formats()}),
           "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-ready=\"1\""));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-count=\"8 tensors\" data-drawn=\"8\" data-first=\"0,1,2\" data-step=\"111\""));
  EXPECT_THAT(body, HasSubstr("data-down=\"0,1,2\" data-sorted=\"descending\" data-up=\"7,6,5\" data-order=\"0,1,2\""));
  // Both runs' histograms and courses, forward and backward; two formats for four rows.
  EXPECT_THAT(body, HasSubstr("data-detail=\"layers.0  y_1  [64, 64]\" data-pictures=\"4\""));
  EXPECT_THAT(body, HasSubstr("data-formats=\"8\""));
  // A picture a layer, a curve a run.
  EXPECT_THAT(body, HasSubstr("data-layers=\"layers.0,layers.1\" data-courses=\"4\" data-curves=\"4\""));
  // 2^-4 at the first step, 2^-15 at the last.
  EXPECT_THAT(body, HasSubstr("data-last=\"3.05e-5\""));
  EXPECT_THAT(body, HasSubstr("data-moved=\"1\" data-then=\"0.06246\""));
  EXPECT_THAT(body, HasSubstr("data-found=\"1 of 8 tensors\""));
  EXPECT_THAT(body, HasSubstr("data-lossy=\"8 tensors\""));
  EXPECT_THAT(
      body,
      HasSubstr("data-bands=\"other\" data-bottom=\"7\" data-colors=\"s0,s1\" data-wide=\"fits\" data-side=\"both\""));
}

TEST_F(Browser, AHistoryFitsANarrowPageAndShowsSeveralRuns) {
  HistoryView view{"three", {}, formats()};
  for (const char* name : {"a", "b", "c"}) view.runs.push_back({name, made(8, 3, 0, -4)});
  const std::string body = body_tag(open(page_of(view), "--dump-dom --window-size=500,800"));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-colors=\"s0,s1,s2\" data-wide=\"fits\" data-side=\"one\" data-heads=\"4\""));
}

TEST_F(Browser, AHistoryWithoutGradientsShowsNoneOfTheirAxes) {
  History history = made(4, 3, 0, -4);
  HtmlReport both("both"), one("one");
  both.section("Scales").add(HistoryView{"both", {{"a", history}}, formats()});
  for (HistoryStep& step : history.steps) std::erase_if(step.rows, [](const HistoryRow& row) { return row.backward; });
  one.section("Scales").add(HistoryView{"forward", {{"a", history}}, formats()});
  const std::string axis = "data-sort=\"gradients: max\"", of_values = "data-sort=\"values: max\"";
  EXPECT_THAT(open(both.html(), "--dump-dom"), AllOf(HasSubstr(axis), HasSubstr(of_values)));
  EXPECT_THAT(open(one.html(), "--dump-dom"), AllOf(Not(HasSubstr(axis)), HasSubstr(of_values)));
}

TEST(HistoryViews, OfHashesAreForDiffs) {
  const auto remedy_for = [](const History& history) {
    try {
      check_recorded({"view", {{"a", history}}, {}});
    } catch (const Error& e) {
      return e.remedy();
    }
    return std::string();
  };
  EXPECT_THAT(remedy_for({}), HasSubstr("rules"));
  History history;
  history.hashes.push_back({1, {}});
  EXPECT_THAT(remedy_for(history), HasSubstr("plumb diff"));
}

TEST_F(Browser, MarksOfACurveThatHardlyMovesAreToldApart) {
  History history = made(4, 12, 0, -4);
  for (size_t s = 0; s < history.steps.size(); ++s)
    for (HistoryRow& row : history.steps[s].rows) row.data.std = 1.38 + 0.003 * static_cast<double>(s);
  const std::string dom = open(page_of({"flat", {{"a", history}}, formats()}), "--dump-dom");
  EXPECT_THAT(dom, ::testing::ContainsRegex(">1\\.(38|39|40|41)</text>"));
  const size_t first = dom.find(">1.4</text>");
  EXPECT_TRUE(first == dom.npos || dom.find(">1.4</text>", first + 1) == dom.npos);
}

TEST_F(Browser, AHistoryOfTwoThousandTensorsStaysUsable) {
  const std::string page = page_of({"large", {{"a", made(2000, 40, 0, 0)}, {"b", made(2000, 40, 0, -3)}}, formats()});
  EXPECT_LT(page.size(), 40u << 20);
  const std::string body = body_tag(open(page, "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-ready=\"1\""));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-count=\"2000 tensors\""));
  EXPECT_THAT(body, HasSubstr("data-bottom=\"1999\""));
  // Only what is in sight is drawn.
  EXPECT_THAT(body, ::testing::ContainsRegex("data-drawn=\"[1-5][0-9]\""));
}

}  // namespace
}  // namespace plumb
