#include "plumb/analysis/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <random>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/browser_testing.h"
#include "plumb/analysis/graph_picture.h"
#include "plumb/analysis/history_testing.h"
#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(HtmlReport, EscapesWhateverItIsGiven) {
  const std::string evil = "</script><script>alert(1)</script><b x='\">\xff";
  HtmlReport report(evil, evil);
  report.section(evil).prose("**" + evil + "** `" + evil + "`\n\n- " + evil).code(evil).figures({{evil, evil, evil}});
  report.add(Table{{evil}, {{evil}}, evil});
  report.add(LineChart{evil, evil, evil, {{evil, {1, 2, NAN}}}});
  HistoryView view{evil, {{evil, made(2, 2, 0, 0, evil)}}, {FPFormat::parse("e5m2")}};
  view.runs[0].history.tensors[1].name = view.runs[0].history.tensors[1].module = evil;
  report.prose(conclusion(view)).add(view).add(layer_table(view));
  const Graph graph = parse_graph(
      "graph {\n  %x: f32[2] = placeholder \"</script><b x='\\\">\" in \"</script><script>alert(1)\":\"b\"\n"
      "  output(%x)\n}\n");
  report.prose(conclusion(graph)).add(graph);
  EXPECT_THAT(graph_svg(graph), Not(HasSubstr("<b x")));
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
  const HistoryView view{
      "Every tensor, plain and unit-scaled",
      {{"FP8, plain", made(10 * layers, 3, -3, -12)}, {"FP8, unit-scaled", made(10 * layers, 3, 0, 0)}},
      {FPFormat::parse("e4m3fn"), FPFormat::parse("e5m2")}};
  report.section("Scales").prose(conclusion(view)).add(view).add(layer_table(view));
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
  // A reader's actions, by script; results as attributes of the body.
  const std::string reader = R"(<script>
const d = document, out = d.body.dataset, one = (s, of = d) => of.querySelector(s), all = (s, of = d) => [...of.querySelectorAll(s)];
const layers = all("table").pop(), layerRows = () => layers.tBodies[0].rows.length;
out.layers = layerRows(); layers.tBodies[0].rows[0].click(); out.unfolded = layerRows() - out.layers;
out.dots = all("td .dot").map(e => e.className).slice(0, 3).join();
const loss = all("th button")[1], cells = () => all("tbody tr").slice(0, 3).map(r => r.cells[1].textContent).join();
loss.click(); out.up = cells(); loss.click(); out.down = cells();
const plot = one(".line-chart .plot"), curves = () => all(".line-chart .curve").map(g => g.dataset.curve).join("");
const at = (kind, part, of = plot) => { const box = of.getBoundingClientRect();
  of.dispatchEvent(new PointerEvent(kind, {bubbles: true, clientX: box.left + box.width * part, clientY: box.top + box.height / 2})); };
at("pointermove", .5); out.hover = one("#tip").hidden ? "hidden" : one("#tip").textContent.split("\n").length;
one(".line-chart .names button").click(); out.curves = curves(); one(".line-chart .names button").click();
const axis = () => all(".line-chart .plot text").map(t => t.textContent), before = axis().join();
const log = one(".line-chart input[type=checkbox]"); log.checked = true; log.onchange(); out.log = axis().join() === before ? "same" : "other";
log.checked = false; log.onchange();
at("pointerdown", .5); at("pointermove", .6); at("pointerup", .6);
const zoomed = axis().map(Number).filter(x => x > 100); out.zoomed = Math.min(...zoomed) > 250 && Math.max(...zoomed) < 400 ? "yes" : zoomed.join();
one(".line-chart .tools .more").click(); out.whole = axis().join() === before ? "same" : "other";
const mean = one(".line-chart input[type=range]"); mean.value = 1; mean.oninput(); out.rough = all(".line-chart .curve path").length;
at("pointermove", .1, one(".timeline-chart .lane"));
at("pointermove", .1, one(".timeline-chart g g rect"));
out.tip = one("#tip").textContent.split("\n")[0];
one("#theme").click(); out.theme = d.documentElement.dataset.theme;
</script>)";
  std::string page = example(8).html();
  page.insert(page.rfind("</body>"), reader);
  const std::string body = body_tag(open(page, "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-ready=\"1\""));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-layers=\"20\" data-unfolded=\""));
  EXPECT_THAT(body, Not(HasSubstr("data-unfolded=\"0\"")));
  // A run has its color in tables too.
  EXPECT_THAT(body, HasSubstr("data-dots=\"dot s0,dot s1,dot s2\""));
  EXPECT_THAT(body, HasSubstr("data-up=\"2.05,2.1,3.1\" data-down=\"3.1,2.1,2.05\""));
  EXPECT_THAT(body, HasSubstr("data-hover=\"4\" data-curves=\"123\" data-log=\"other\" data-zoomed=\"yes\""));
  // Four curves and a cross, and no faint ones.
  EXPECT_THAT(body, HasSubstr("data-whole=\"same\" data-rough=\"5\""));
  EXPECT_THAT(body, HasSubstr("data-tip=\"F0: stage 0, microbatch 0, rank 0\""));
  EXPECT_THAT(body, HasSubstr("data-theme=\"dark\""));
}

TEST_F(Browser, ALineThatLiesOnAnotherStandsOutAroundIt) {
  LineChart chart{.curves = {{"a", {3, 2, 1}}, {"b", {9, 9, 9}}, {"c", {3, 2, 1}, {}, true}}};
  std::string page = HtmlReport("a").add(chart).html();
  page.insert(page.rfind("</body>"), R"(<script>
document.body.dataset.widths = [...document.querySelectorAll(".curve path")].map(p => p.getAttribute("stroke-width")).join();
document.body.dataset.name = document.querySelectorAll(".names button")[2].textContent;
</script>)");
  const std::string body = body_tag(open(page, "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-widths=\"7,2,2\" data-name=\"c (equal to a at every step)\""));
}

TEST_F(Browser, APageFitsANarrowScreen) {
  std::string page = example(4).html();
  page.insert(page.rfind("</body>"), R"(<script>
document.body.dataset.fits = document.documentElement.scrollWidth <= innerWidth ? "yes" : document.documentElement.scrollWidth;
document.body.dataset.plot = document.querySelector(".plot svg").getBoundingClientRect().width <= innerWidth - 40 ? "yes" : "no";
</script>)");
  const std::string body = body_tag(open(page, "--dump-dom --window-size=500,900"));
  EXPECT_THAT(body, HasSubstr("data-fits=\"yes\" data-plot=\"yes\""));
}

constexpr const char* kTwoBlocks = R"(graph {
  %x: f32[2, 4] = placeholder "x"
  %w: f32[4, 4] grad = get_attr "blocks.0.up.weight"
  %norm: f32[2, 4] = aten::relu(%x) in "blocks.0":"Block" "blocks.0.norm":"Norm"
  %up: f32[2, 4] = aten::mm(%norm, %w) in "blocks.0":"Block"
  %act: f32[2, 4] = aten::gelu(%up) in "blocks.0":"Block"
  %add: f32[2, 4] = aten::add.Tensor(%act, %x) in "blocks.0":"Block"
  %last: f32[2, 4] = aten::tanh(%add) in "blocks.1":"Block"
  %sum: f32[2, 4] = aten::add.Tensor(%last, %add) in "blocks.1":"Block"
  output(%sum)
}
)";

TEST(GraphPicture, BoxesModulesAndRunsWiresThatGoFurtherBesideThem) {
  const Graph graph = parse_graph(kTwoBlocks);
  const std::string picture = graph_svg(graph);
  // blocks, 0 and 1; the module of one line has no box, the line says its name.
  size_t boxes = 0, lanes = 0;
  for (size_t at = 0; (at = picture.find("class=\"module\"", at)) != std::string::npos; ++at) ++boxes;
  EXPECT_EQ(boxes, 3u);
  EXPECT_THAT(picture, HasSubstr(">norm: relu</text>"));
  // The parameter stands with what uses it.
  EXPECT_THAT(picture, HasSubstr("f32[2, 4]  (weight)"));
  EXPECT_THAT(picture, HasSubstr("blocks.0.up.weight"));
  // x goes to norm and past it to the first add; the add to the next line and past it to the second, in a lane of its
  // own: one of them ends where the other begins.
  for (size_t at = 0; (at = picture.find("m4 -3l-4 3l4 3", at)) != std::string::npos; ++at) ++lanes;
  EXPECT_EQ(lanes, 4u);
  EXPECT_THAT(picture, HasSubstr("H321"));
  EXPECT_THAT(picture, HasSubstr("H314"));
  // A line after a module inside of its own is in the box.
  EXPECT_THAT(graph_svg(parse_graph("graph {\n  %x: f32[2] = placeholder \"x\"\n"
                                    "  %a: f32[2] = aten::relu(%x) in \"b\":\"B\" \"b.n\":\"N\"\n"
                                    "  %c: f32[2] = aten::relu(%a) in \"b\":\"B\" \"b.m\":\"N\"\n"
                                    "  %d: f32[2] = aten::relu(%c) in \"b\":\"B\"\n  output(%d)\n}\n")),
              Not(HasSubstr("b: relu")));
  EXPECT_EQ(conclusion(graph),
            "6 operators in 3 modules, 1 parameters and buffers. The one used most is "
            "`aten::add`, 2 times.");
}

TEST_F(Browser, AGraphFoldsByModuleAndIsSearched) {
  std::string page = HtmlReport("a").add(parse_graph(kTwoBlocks)).html();
  page.insert(page.rfind("</body>"), R"(<script>
const d = document, out = d.body.dataset, all = s => [...d.querySelectorAll(s)];
const shown = () => all(".graph-view .node").filter(g => g.style.display !== "none").length;
const height = () => +d.querySelector(".graph-scroll svg").getAttribute("height"), head = n => all(".module-head")[n];
const whole = height(); out.lines = shown(); out.text = all(".wire").map(w => w.getAttribute("d")).join().includes("NaN") ? "NaN" : "numbers";
const before = all(".wire").map(w => w.getAttribute("d")).join();
head(1).onclick(); out.folded = shown(); out.smaller = height() < whole; out.wires = all(".wire").filter(w => w.style.display !== "none").length;
out.head = head(1).querySelector("text").textContent;
head(0).onclick(); out.outer = shown();
const search = d.querySelector("input[type=search]"); search.value = "mm weight"; search.oninput();
out.found = all(".node.found").length; out.unfolded = shown(); out.count = d.querySelector(".count").textContent;
d.querySelector(".unfold-all").onclick(); out.again = shown(); out.same = height() === whole && before === all(".wire").map(w => w.getAttribute("d")).join();
</script>)");
  const std::string body = body_tag(open(page, "--dump-dom"));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-lines=\"8\" data-text=\"numbers\" data-folded=\"4\" data-smaller=\"true\""));
  EXPECT_THAT(body, HasSubstr("data-head=\"\u25B8 0  (4 lines)\" data-outer=\"2\""));
  EXPECT_THAT(
      body,
      HasSubstr("data-found=\"1\" data-unfolded=\"8\" data-count=\"1 of 1\" data-again=\"8\" data-same=\"true\""));
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
  // Python's standard library reads the picture: size and number of colors.
  write_file_atomically(folder_ / "colors.py", R"(
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
above, colors = bytearray(width * n), set()
for y in range(height):
    filt, row = data[y * (width * n + 1)], bytearray(data[y * (width * n + 1) + 1:(y + 1) * (width * n + 1)])
    for i in range(width * n):
        a, b, c = row[i - n] if i >= n else 0, above[i], above[i - n] if i >= n else 0
        p = a + b - c
        near = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        row[i] = (row[i] + (0, a, b, (a + b) // 2, near)[filt]) & 255
    colors.update(bytes(row[i:i + 3]) for i in range(0, width * n, n))
    above = row
print(width, height, len(colors))
)");
  ASSERT_EQ(std::system(("cd '" + folder_.string() + "' && " + PLUMB_TEST_PYTHON + " colors.py >colors").c_str()), 0);
  std::ifstream in(folder_ / "colors");
  int width = 0, height = 0, colors = 0;
  in >> width >> height >> colors;
  EXPECT_EQ(width, 350);
  EXPECT_EQ(height, 550);
  EXPECT_GT(colors, 400);
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
