#include "plumb/analysis/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <random>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/browser_for_test.h"
#include "plumb/core/error.h"
#include "plumb/core/file.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

TEST(HtmlReport, EscapesWhateverItIsGiven) {
  const std::string evil = "</script><script>alert(1)</script><b x='\">\xff";
  HtmlReport report(evil, evil);
  report.section(evil).prose("**" + evil + "** `" + evil + "`\n\n- " + evil).code(evil).figures({{evil, evil, evil}});
  report.add(Table{{evil}, {{evil}}, evil});
  report.add(LineChart{evil, evil, evil, {{evil, {1, 2, NAN}}}});
  const ScaleStats stats{.mean_abs = 1, .std = 1, .abs_max = 2, .abs_min = 0, .exponents = {{0, 1}}};
  report.add(ScaleChart{evil, {{evil, {{evil, evil, evil, stats, stats}}}}, FormatBand{evil, 1, 2, 4}});
  report.add(TimelineChart{evil, {{evil, evil, {{0, evil, 0, 0, 0, 1}}, 1, evil}}});
  std::string page = report.html();
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("<b x")));
  EXPECT_THAT(page, Not(HasSubstr("\xff")));
  EXPECT_THAT(page, HasSubstr("&lt;/script&gt;"));
}

TEST(HtmlReport, LoadsNothingFromAnywhere) {
  const std::string page = HtmlReport("a").section("b").html();
  for (const char* loads : {"src=", "@import", "url(", "<link", "fetch(", "https:"}) {
    EXPECT_THAT(page, Not(HasSubstr(loads)));
  }
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

TEST(HtmlReport, MarksProseAndLeavesLoneMarksAlone) {
  const std::string page = HtmlReport("a").prose("one **two**\nthree `4 < 5`\n\n- x\n- y\nz\n\na ** b ` c").html();
  EXPECT_THAT(page, HasSubstr("<p>one <strong>two</strong> three <code>4 &lt; 5</code></p>\n"
                              "<ul>\n<li>x</li>\n<li>y z</li>\n</ul>\n<p>a ** b ` c</p>"));
}

TEST(HtmlReport, SaysWhichFileCannotBeWritten) { EXPECT_THROW(HtmlReport("a").write("/proc/none/report.html"), Error); }

// A model of `layers` layers as it may look: without scaling gradients shrink below a format's range.
std::vector<ScaleRow> model(int layers, bool scaled) {
  std::mt19937 random(7);
  std::normal_distribution<double> noise(0, 0.4);
  const FPFormat fwd_format = FPFormat::parse("e4m3fn"), bwd_format = FPFormat::parse("e5m2");
  auto stats = [&](double exponent, const FPFormat& format) {
    TensorMetrics m;
    m.std = std::exp2(exponent + (scaled ? noise(random) * 0.3 : noise(random)));
    m.mean_abs = m.std * 0.8, m.abs_max = m.std * 4.2, m.abs_min = m.std * 1e-5, m.numel = 1 << 16;
    ExponentHistogram histogram;
    const int top = static_cast<int>(std::floor(std::log2(m.abs_max)));
    for (int e = top; e > top - 16; --e) {
      // Of a normal distribution.
      const double a = std::exp2(e) / m.std;
      histogram.counts[static_cast<size_t>(e + 127)] =
          std::llround((std::erf(2 * a / std::sqrt(2.0)) - std::erf(a / std::sqrt(2.0))) * double(m.numel));
    }
    m.histogram = histogram;
    return scale_stats(m, &format);
  };
  std::vector<ScaleRow> rows;
  const char* parts[][3] = {{"norm1", "layer_norm", "aten::layer_norm"},
                            {"attn.qkv", "qkv", "aten::linear"},
                            {"attn", "softmax", "aten::softmax"},
                            {"attn", "attention", "aten::matmul"},
                            {"attn.out", "proj", "aten::linear"},
                            {"", "add", "aten::add"},
                            {"norm2", "layer_norm", "aten::layer_norm"},
                            {"mlp.up", "up", "aten::linear"},
                            {"mlp", "gelu", "aten::gelu"},
                            {"mlp.down", "down", "aten::linear"}};
  for (int l = 0; l < layers; ++l) {
    for (const auto& [module, name, op] : parts) {
      const double depth = static_cast<double>(layers - l) / layers;
      const double fwd = std::string(name) == "softmax" ? -6.5 : std::string(name) == "add" ? 1.5 * (1 - depth) : -0.5;
      const std::string path = "layers." + std::to_string(l) + (*module ? "." : "") + module;
      rows.push_back({std::string(name) + "_" + std::to_string(l), path, op, stats(scaled ? 0 : fwd, fwd_format),
                      stats(scaled ? 0 : -9 - 6 * depth, bwd_format)});
    }
  }
  return rows;
}

HtmlReport example(int layers) {
  HtmlReport report("Eight bits, with and without unit scaling", "an example with made-up numbers");
  report.figures({{"2.15", "FP32", "nats a byte"},
                  {"3.16", "FP8, plain", "46.9 % worse"},
                  {"2.10", "FP8, unit-scaled", "2.3 % better"},
                  {"2.10", "the same over two processes", "every loss equal bit for bit"}});
  report.section("Losses").prose(
      "Four runs from the same start and data. Plain FP8 **stops learning early**: its gradients fall below the "
      "smallest "
      "value of `e5m2` and become zero. Unit scaling keeps every tensor near a standard deviation of one.");
  LineChart losses{.title = "Training loss", .y_label = "nats a byte", .smooth = 20};
  std::mt19937 random(3);
  std::normal_distribution<double> noise(0, 0.06);
  const std::pair<const char*, double> ends[] = {{"FP32", 2.1}, {"FP8, plain", 3.1}, {"FP8, unit-scaled", 2.05}};
  Table table{{"run", "loss", "change", "time"}, {}};
  for (const auto& [name, end] : ends) {
    Curve curve{name};
    for (int i = 0; i < 600; ++i) curve.values.push_back(end + 3.4 * std::exp(-i / 70.0) + noise(random));
    losses.curves.push_back(curve);
    table.rows.push_back({name, short_number(end), percent(end / 2.1 - 1), short_number(end * 10) + " s"});
  }
  losses.curves.push_back({"FP8, too high a rate", {5.5, 5.1, 4.9, 5.6, NAN}, {0, 30, 60, 90, 120}, true});
  report.add(losses).add(table);
  report.section("Scales").add(
      ScaleChart{.title = "Every tensor, before and after unit scaling",
                 .variants = {{"before", model(layers, false)}, {"after", model(layers, true)}},
                 .fwd_band = band_of(FPFormat::parse("e4m3fn")),
                 .bwd_band = band_of(FPFormat::parse("e5m2"))});
  report.section("Pipeline");
  const Schedule schedule = one_f_one_b_schedule(4, 8);
  const Simulation simulation = simulate_schedule(schedule);
  std::vector<TimelineEvent> events;
  for (size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    double free = 12;
    for (size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const Span& span = simulation.spans[rank][i];
      const double start = 12 + span.start * 0.004 + 0.0004 * std::fabs(noise(random));
      if (!schedule.rows[rank][i].is_compute()) continue;
      events.push_back({static_cast<int>(rank), schedule.rows[rank][i], std::min(free, start), start,
                        12 + span.end * 0.004 - 0.0003});
      free = events.back().end;
    }
  }
  report.add(TimelineChart{.title = "1F1B, four ranks, eight microbatches",
                           .runs = {timeline_of(events), timeline_of(schedule, simulation)}});
  const Schedule v = zbv_schedule(4, 8);
  report.add(TimelineChart{.title = "ZB-V", .runs = {timeline_of(v, simulate_schedule(v))}});
  report.section("How").code("$ plumb track model.pt2 --format e4m3fn,e5m2\n");
  return report;
}

TEST_F(Browser, RunsThePagesScriptsWithoutErrorAndActsOnClicks) {
  // What a reader would do, by script; results as attributes of the body.
  const std::string reader = R"(<script>
const d = document, out = d.body.dataset, one = (s, of = d) => of.querySelector(s), all = (s, of = d) => [...of.querySelectorAll(s)];
const shown = () => all(".row").filter(r => r.style.display !== "none").length;
out.rows = shown();
const search = one("input[type=search]"), box = one("input[type=checkbox]");
search.value = "layers.7. LINEAR"; search.oninput(); out.filtered = shown();
search.value = ""; search.oninput(); box.checked = true; box.onchange(); out.lossy = shown();
box.checked = false; box.onchange(); out.again = shown();
all(".row")[3].dispatchEvent(new MouseEvent("click", {bubbles: true}));
out.detail = one(".detail h4").textContent; out.histograms = all(".detail svg").length;
const loss = all("th button")[1], cells = () => all("tbody tr").slice(0, 3).map(r => r.cells[1].textContent).join();
loss.click(); out.up = cells(); loss.click(); out.down = cells();
const chart = one(".line-chart svg"), at = chart.getBoundingClientRect();
chart.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: at.left + at.width / 2, clientY: at.top + at.height / 2}));
out.hover = one("#tip").hidden ? "hidden" : one("#tip").textContent.split("\n").length;
one(".legend").dispatchEvent(new MouseEvent("click", {bubbles: true})); out.off = all(".curve.off").length;
one(".timeline-chart svg rect").dispatchEvent(new MouseEvent("mousemove", {bubbles: true}));
one(".timeline-chart svg g g rect").dispatchEvent(new MouseEvent("mousemove", {bubbles: true}));
out.tip = one("#tip").textContent.split("\n")[0];
one("#theme").click(); out.theme = d.documentElement.dataset.theme;
</script>)";
  std::string page = example(8).html();
  page.insert(page.rfind("</body>"), reader);
  const std::string body = body_tag(open(page, "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-ready=\"1\""));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-rows=\"80\""));
  EXPECT_THAT(body, HasSubstr("data-filtered=\"4\""));
  EXPECT_THAT(body, HasSubstr("data-again=\"80\""));
  EXPECT_THAT(body, Not(HasSubstr("data-lossy=\"0\"")));
  EXPECT_THAT(body, Not(HasSubstr("data-lossy=\"80\"")));
  EXPECT_THAT(body, HasSubstr("data-detail=\"layers.0.attn  attention_0\" data-histograms=\"2\""));
  EXPECT_THAT(body, HasSubstr("data-up=\"2.05,2.1,3.1\" data-down=\"3.1,2.1,2.05\""));
  EXPECT_THAT(body, HasSubstr("data-hover=\"4\" data-off=\"1\""));
  EXPECT_THAT(body, HasSubstr("data-tip=\"F0: stage 0, microbatch 0, rank 0\""));
  EXPECT_THAT(body, HasSubstr("data-theme=\"dark\""));
}

TEST_F(Browser, TellsOfAnErrorInAScript) {
  std::string page = HtmlReport("a").html();
  page.insert(page.rfind("</body>"), "<script>nothing.at.all</script>");
  EXPECT_THAT(body_tag(open(page, "--dump-dom")), HasSubstr("data-error="));
}

TEST_F(Browser, OpensAPageOfTwoThousandTensors) {
  const std::string page = example(200).html();
  EXPECT_LT(page.size(), 24u << 20);
  const std::string dom = open(page, "--dump-dom");
  EXPECT_THAT(body_tag(dom), HasSubstr("data-ready=\"1\""));
  EXPECT_THAT(body_tag(dom), Not(HasSubstr("data-error")));
  EXPECT_THAT(dom, HasSubstr("2000 tensors"));
}

TEST_F(Browser, PaintsThePage) {
  if (const char* keep = std::getenv("PLUMB_KEEP_REPORT")) example(12).write(keep);
  open(example(12).html(), "--screenshot=shot.png --window-size=700,1100 --force-device-scale-factor=0.5");
  // Python's standard library reads the picture: size and number of colours.
  write_file_atomically(folder_ / "colours.py", R"(
import struct, zlib
raw = open("shot.png", "rb").read()
width, height, depth, kind = struct.unpack(">IIBB", raw[16:26])
assert raw[:8] == b"\x89PNG\r\n\x1a\n" and depth == 8 and kind in (2, 6), (depth, kind)
at, packed = 8, b""
while at < len(raw):
    size, name = struct.unpack(">I4s", raw[at:at + 8])
    if name == b"IDAT": packed += raw[at + 8:at + 8 + size]
    at += size + 12
data, n = zlib.decompress(packed), 3 if kind == 2 else 4
above, colours = bytearray(width * n), set()
for y in range(height):
    filt, row = data[y * (width * n + 1)], bytearray(data[y * (width * n + 1) + 1:(y + 1) * (width * n + 1)])
    for i in range(width * n):
        a, b, c = row[i - n] if i >= n else 0, above[i], above[i - n] if i >= n else 0
        p = a + b - c
        near = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        row[i] = (row[i] + (0, a, b, (a + b) // 2, near)[filt]) & 255
    colours.update(bytes(row[i:i + 3]) for i in range(0, width * n, n))
    above = row
print(width, height, len(colours))
)");
  ASSERT_EQ(std::system(("cd '" + folder_.string() + "' && " + PLUMB_TEST_PYTHON + " colours.py >colours").c_str()), 0);
  std::ifstream in(folder_ / "colours");
  int width = 0, height = 0, colours = 0;
  in >> width >> height >> colours;
  EXPECT_EQ(width, 350);
  EXPECT_EQ(height, 550);
  EXPECT_GT(colours, 400);
}

TEST_F(Browser, ATableOfThousandsOfRowsSortsAllAndShowsTheFirst) {
  Table table{{"name", "number"}, {}};
  for (int i = 0; i < 2500; ++i) table.rows.push_back({"layer." + std::to_string(i), std::to_string(i * 7919 % 2500)});
  std::string page = HtmlReport("Table").add(table).html();
  page.insert(page.rfind("</body>"), R"(<script>
const out = document.body.dataset, rows = () => document.querySelector("tbody").rows;
const heads = document.querySelectorAll("th button"), more = document.querySelector("button.more");
out.first = rows().length; out.more = more.textContent;
heads[1].click(); out.least = rows()[0].cells[0].textContent;
heads[1].click(); out.largest = rows()[0].cells[1].textContent; out.still = rows().length;
heads[0].click(); out.third = rows()[2].cells[0].textContent;
more.click(); out.all = rows().length; out.last = rows()[2499].cells[0].textContent;
</script>)");
  const std::string body = body_tag(open(page, "--dump-dom"));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-first=\"200\" data-more=\"all 2500 rows\" data-least=\"layer.0\""));
  EXPECT_THAT(body, HasSubstr("data-largest=\"2499\" data-still=\"200\" data-third=\"layer.2\""));
  EXPECT_THAT(body, HasSubstr("data-all=\"2500\" data-last=\"layer.2499\""));
}

}  // namespace
}  // namespace plumb
