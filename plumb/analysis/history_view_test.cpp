#include "plumb/analysis/history_view.h"

#include <gmock/gmock.h>

#include <cmath>
#include <random>

#include "plumb/analysis/browser_for_test.h"
#include "plumb/analysis/html_report.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Tensors of standard deviation 2^(fwd_exponent), gradients of 2^(bwd_exponent - step).
History made(int tensors, int steps, double fwd_exponent, double bwd_exponent, const std::string& op = "aten::linear") {
  History history;
  for (int t = 0; t < tensors; ++t) {
    const std::string module = "layers." + std::to_string(t / 4);
    history.tensors.push_back(
        {module + ".y_" + std::to_string(t), module, t % 4 ? op : "aten::gelu", "float32", {64, 64}});
  }
  for (int s = 0; s < steps; ++s) {
    HistoryStep step{1 + 10 * s, {}};
    for (int t = 0; t < tensors; ++t) {
      for (const bool backward : {false, true}) {
        Metrics::Data d;
        d.std = std::exp2((backward ? bwd_exponent - s : fwd_exponent) - t * 0.001);
        d.mean_abs = d.std * 0.8, d.abs_max = d.std * 4, d.abs_min = d.std * 0x1p-12, d.numel = 4096;
        auto histogram = std::make_shared<ExponentHistogram>();
        const int top = static_cast<int>(std::floor(std::log2(d.abs_max)));
        for (int e = 0; e < 12; ++e)
          histogram->counts[static_cast<size_t>(std::max(1, 127 + top - e))] += 4096 >> (e + 1);
        histogram->counts[0] = 1;
        d.histogram = histogram;
        step.rows.push_back({static_cast<uint32_t>(t), backward, false, kAllStatistics, d});
      }
    }
    history.steps.push_back(std::move(step));
    history.scalars.push_back({1 + 10 * s, {{"loss", 5.0 / (s + 1)}}});
  }
  return history;
}

std::vector<FPFormat> formats() { return {FPFormat::parse("e4m3fn"), FPFormat::parse("e5m2")}; }

TEST(HistoryView, AnswersWhatEachFormatWouldDoToAGradient) {
  HistoryView view{"", {{"run", made(2, 20, 0, 0)}}, formats()};
  const Table first = format_table(view, 1), last = format_table(view);
  ASSERT_EQ(first.rows.size(), 4u);
  EXPECT_EQ(first.header[3], "e4m3fn to 0");
  EXPECT_EQ(first.header[6], "e5m2 to 0");
  const TensorMetrics m = view.runs[0].history.steps.back().rows[1].data.full();
  const auto& worst = last.rows[0];
  EXPECT_EQ(worst[2], "gradient");
  EXPECT_EQ(worst[6], percent(m.underflow_share(view.formats[1])));
  EXPECT_GT(std::stod(worst[3]), 90);  // E4M3 ends 2^7 above E5M2
  EXPECT_LT(std::stod(first.rows[0][6]), 1);
  EXPECT_EQ(format_table(view, 0, 3).rows.size(), 3u);
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
}

TEST(HistoryView, NamesTheRankAndStageOfATensorWhereTheyAreKnown) {
  HistoryView view{"", {{"run", made(2, 1, 0, 0)}}, formats()};
  EXPECT_THAT(to_html(view), Not(HasSubstr("rank")));
  view.runs[0].history.tensors[1].stage = 1;
  view.runs[0].history.tensors[1].rank = 3;
  view.runs[0].history.events.push_back({1, 0, "std > 0", 1, {{1, false, 5}}});
  const Table table = format_table(view);
  EXPECT_EQ(table.header[2], "part");
  for (const auto& row : table.rows) EXPECT_EQ(row[2], row[0] == "layers.0.y_1" ? "stage 1, rank 3" : "");
  EXPECT_EQ(event_table(view).rows[0][4], "layers.0.y_1 of stage 1, rank 3: 5");
  EXPECT_THAT(to_html(view), HasSubstr("stage 1, rank 3"));
}

TEST(HistoryView, DrawsNoRangeWhereEveryBlockHasItsOwn) {
  HistoryView view{"", {{"run", made(2, 1, 0, 0)}}, {FPFormat::parse("mxfp8"), FPFormat::parse("e5m2")}};
  const ScaleChart chart = scale_chart(view);
  EXPECT_FALSE(chart.fwd_band.has_value());
  EXPECT_TRUE(chart.bwd_band.has_value());
  EXPECT_NO_THROW(to_svg(chart));
  EXPECT_THAT(to_html(view), HasSubstr("{\"name\":\"mxfp8e4m3\"}"));
  EXPECT_EQ(format_table(view).header[3], "mxfp8e4m3 to 0");
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

TEST(HistoryView, RefusesWhatItCannotShow) {
  EXPECT_THROW(to_html(HistoryView{}), Error);
  EXPECT_THROW(to_html(HistoryView{"", {{"a", History{}}}}), Error);
  const HistoryRun run{"a", made(1, 1, 0, 0)};
  EXPECT_THROW(to_html(HistoryView{"", {run, run, run}}), Error);
  EXPECT_NO_THROW(to_html(HistoryView{"", {run}}));
}

TEST(HistoryView, EscapesNamesAndThinsLongHistories) {
  HistoryView view{"</script><b>", {{"<b>", made(4, 200, 0, 0)}}, formats()};
  view.runs[0].history.tensors[0].name = "</script><script>alert(1)</script>";
  view.max_bytes = 20000;
  const std::string html = to_html(view);
  EXPECT_THAT(html, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(html, Not(HasSubstr("<b>")));
  EXPECT_THAT(html, HasSubstr("of 200 recorded steps"));
  EXPECT_LT(html.size(), 60000u);
}

// What a reader would do, by script; results as attributes of the body.
constexpr const char* kReader = R"(<script>
const d = document, out = d.body.dataset, one = (s, of = d) => of.querySelector(s), all = (s, of = d) => [...of.querySelectorAll(s)];
const names = () => all(".history-space .row").slice(0, 3).map(r => r.dataset.tensor).join();
const slider = one(".stepper input"), scroll = one(".history-scroll"), count = () => one(".count").textContent;
out.count = count(); out.drawn = all(".history-space .row").length; out.first = names(); out.step = one("output").textContent;
const heads = all(".history-head button"), click = k => heads[k].dispatchEvent(new MouseEvent("click", {bubbles: true}));
const started = performance.now();
click(7); out.down = names(); out.sorted = heads[7].getAttribute("aria-sort");
click(7); out.up = names();
click(0); out.order = names();
one('.history-space .row[data-tensor="1"]').dispatchEvent(new MouseEvent("click", {bubbles: true}));
const gradient = () => all(".detail tbody tr").find(r => r.cells[1].textContent === "gradient").cells;
out.detail = one(".detail h4").textContent; out.pictures = all(".detail svg").length; out.last = gradient()[4].textContent;
out.formats = all(".detail table")[1].tBodies[0].rows.length;
slider.value = 0; slider.oninput(); out.moved = one("output").textContent; out.then = gradient()[4].textContent;
const shareOf = () => all(".detail table")[1].tBodies[0].rows[3].cells[3].textContent;
out.share = shareOf(); slider.value = slider.max; slider.oninput(); out.later = shareOf();
const search = one("input[type=search]"); search.value = "layers.1 GELU"; search.oninput(); out.found = count();
search.value = ""; search.oninput();
const lossy = one("input[type=checkbox]"); lossy.checked = true; lossy.onchange(); out.lossy = count(); lossy.checked = false; lossy.onchange();
const bands = all(".history-space .band-normal").map(r => r.getAttribute("width")).join();
const select = one(".of-bwd"); select.selectedIndex = 0; select.onchange();
out.bands = bands === all(".history-space .band-normal").map(r => r.getAttribute("width")).join() ? "same" : "other";
scroll.scrollTop = 1e9; scroll.dispatchEvent(new Event("scroll")); out.bottom = all(".history-space .row").pop().dataset.tensor;
out.colours = new Set(all(".history-space .row g").map(g => g.getAttribute("class"))).size;
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
  // 2^-4 at the first step, 2^-15 at the last.
  EXPECT_THAT(body, HasSubstr("data-last=\"3.05e-5\""));
  EXPECT_THAT(body, HasSubstr("data-moved=\"1\" data-then=\"0.06246\""));
  EXPECT_THAT(body, HasSubstr("data-found=\"1 of 8 tensors\""));
  EXPECT_THAT(body, HasSubstr("data-lossy=\"8 tensors\""));
  EXPECT_THAT(body, HasSubstr("data-bands=\"other\" data-bottom=\"7\" data-colours=\"2\""));
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
