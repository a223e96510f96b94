// The parts of a page that its reader meets: axes, means, folded graphs, the first selection, narrow screens.
#include <gmock/gmock.h>

#include "plumb/analysis/browser_testing.h"
#include "plumb/analysis/history_testing.h"
#include "plumb/analysis/html_report.h"
#include "plumb/analysis/svg.h"
#include "plumb/graph/graph.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string with_script(std::string page, const std::string& script) {
  page.insert(page.rfind("</body>"),
              "<script>\nconst d = document, out = d.body.dataset, all = s => [...d.querySelectorAll(s)];\n" + script +
                  "</script>");
  return page;
}

LineChart falling(int steps, int smooth) {
  Curve curve{"a", {}, {}};
  for (int i = 1; i <= steps; ++i) curve.values.push_back(steps - i + 0.5), curve.steps.push_back(i);
  return {.curves = {curve}, .smooth = smooth, .height = 400};
}

TEST_F(Browser, AxesReachTheEndsOfTheCurves) {
  const std::string body = body_tag(open(with_script(HtmlReport("a").add(falling(97, 1)).html(), R"(
const numbers = t => +t.getAttribute("y"), path = d.querySelector(".curve path").getAttribute("d");
const ys = [...path.matchAll(/[ML][\d.]+ ([\d.]+)/g)].map(m => +m[1]), grid = all(".plot .grid").map(l => +l.getAttribute("y1"));
out.held = Math.min(...grid) <= Math.min(...ys) + .1 && Math.max(...grid) >= Math.max(...ys) - .1;
out.ends = all(".plot text").map(t => t.textContent).filter(t => t === "1" || t === "97").length;
)"),
                                         "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-held=\"true\" data-ends=\"2\""));
}

TEST_F(Browser, AMeanHasNoKinkWhereItsWindowIsFull) {
  const std::string body = body_tag(open(with_script(HtmlReport("a").add(falling(120, 30)).html(), R"(
const ys = [...all(".curve path")[1].getAttribute("d").matchAll(/[ML][\d.]+ ([\d.]+)/g)].map(m => +m[1]);
const slope = ys.slice(1).map((y, i) => y - ys[i]), bend = slope.slice(1).map((s, i) => Math.abs(s - slope[i]));
out.points = ys.length; out.kink = Math.max(...bend.slice(22, 38)) < 0.35;
)"),
                                         "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("data-points=\"120\" data-kink=\"true\""));
}

// With `adds` a residual add stands between two layers, outside of both.
std::string layers_graph(int layers, bool last_differs, bool adds = false) {
  std::string text = "graph {\n  %x: f32[2, 4] = placeholder \"x\"\n", before = "x";
  for (int l = 0; l < layers; ++l) {
    const std::string n = std::to_string(l), path = "\"h." + n + "\":\"Block\"";
    const std::string second = last_differs && l + 1 == layers ? "tanh" : "gelu";
    for (const std::string& op : {std::string("relu"), second, std::string("relu"), std::string("neg")}) {
      const std::string name = op + "_" + n + "_" + std::to_string(text.size());
      text += "  %" + name + ": f32[2, 4] = aten::" + op + "(%" + before + ") in \"h\":\"ModuleList\" " + path + "\n";
      before = name;
    }
    if (adds) {
      text += "  %add_" + n + ": f32[2, 4] = aten::add.Tensor(%" + before + ", %x)\n";
      before = "add_" + n;
    }
  }
  return text + "  output(%" + before + ")\n}\n";
}

TEST_F(Browser, AGraphOpensFoldedWithEqualLayersRolledUpOverItsWholeWidth) {
  const std::string script = R"(
const shown = s => all(s).filter(g => g.style.display !== "none"), heads = () => shown(".module-head").map(g => g.querySelector("text").textContent);
const head = text => shown(".module-head").find(g => g.textContent.includes(text));
out.heads = heads().join("; "); out.lines = shown(".node").length;
const svg = d.querySelector(".graph-scroll svg"), scroll = d.querySelector(".graph-scroll");
out.wide = scroll.clientWidth - svg.clientWidth < 30 && svg.clientWidth <= scroll.clientWidth ? "all" : svg.clientWidth + " of " + scroll.clientWidth;
head("0 to").onclick(); out.unrolled = heads().length; out.second = heads()[2];
head("1 ").onclick(); out.open = shown(".node").length;
d.querySelector(".fold-all").onclick(); out.again = heads().length;
const search = d.querySelector("input[type=search]"); search.value = "h.7"; search.oninput(); out.found = shown(".found").length > 0;
)";
  std::string body =
      body_tag(open(with_script(HtmlReport("a").add(parse_graph(layers_graph(12, false))).html(), script),
                    "--dump-dom --window-size=1400,900"));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(
      body,
      HasSubstr(
          "data-heads=\"\u25BE h; \u25B8 h 0 to 11: 12 \u00d7  (4 lines each)\" data-lines=\"2\" data-wide=\"all\""));
  EXPECT_THAT(body, HasSubstr("data-unrolled=\"13\" data-second=\"\u25B8 1  (4 lines)\" data-open=\"6\""));
  EXPECT_THAT(body, HasSubstr("data-found=\"true\""));
  body = body_tag(
      open(with_script(HtmlReport("a").add(parse_graph(layers_graph(12, true))).html(), script), "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("h 0 to 10: 11 \u00d7  (4 lines each); \u25B8 11  (4 lines)\""));
}

TEST_F(Browser, LayersWithAnAddBetweenThemRollUpAndKeepTheirNumbers) {
  const std::string script = R"(
const shown = s => all(s).filter(g => g.style.display !== "none"), heads = () => shown(".module-head").map(g => g.querySelector("text").textContent);
out.heads = heads().join("; "); out.lines = shown(".node").length;
shown(".module-head")[0].onclick(); out.unrolled = heads().slice(0, 2).join("; "); out.adds = shown(".node").length;
)";
  const auto page = [](bool differs) {
    return HtmlReport("a").add(parse_graph(layers_graph(12, differs, true))).html();
  };
  std::string body = body_tag(open(with_script(page(false), script), "--dump-dom"));
  EXPECT_THAT(body, Not(HasSubstr("data-error")));
  EXPECT_THAT(body, HasSubstr("data-heads=\"\u25B8 h 0 to 11: 12 \u00d7  (4 lines each)\" data-lines=\"3\""));
  EXPECT_THAT(body, HasSubstr("data-unrolled=\"\u25B8 h.0  (5 lines); \u25B8 h.1  (5 lines)\" data-adds=\"14\""));
  body = body_tag(open(with_script(page(true), script), "--dump-dom"));
  EXPECT_THAT(body, HasSubstr("h 0 to 10: 11 \u00d7  (4 lines each); \u25B8 h.11  (5 lines)\""));
}

TEST_F(Browser, LayersOverTheStepsShowWhatWasMeasured) {
  History history = made(8, 5, 0, -4);
  for (HistoryStep& step : history.steps) std::erase_if(step.rows, [](const HistoryRow& row) { return !row.backward; });
  HistoryView view{"gradients", {{"a", history}}, {FPFormat::parse("e4m3fn"), FPFormat::parse("e5m2")}};
  const std::string body = body_tag(open(with_script(HtmlReport("a").add(view).html(), R"(
out.which = d.querySelector(".layer-which").value; out.curves = all(".layers .curve").length;
out.off = all(".layer-which option").filter(o => o.disabled).map(o => o.textContent).join();
)"),
                                         "--dump-dom"));
  EXPECT_THAT(body,
              HasSubstr("data-which=\"gradients\" data-curves=\"2\" data-off=\"values,weights,gradients of weights\""));
}

TEST_F(Browser, RowsOnANarrowScreenKeepTheNumberOfTheirLayer) {
  History history = made(4, 2, 0, -4);
  for (HistoryTensor& t : history.tensors) {
    t.module = "model.decoder.layers.17.self_attention.projection";
    t.name = t.module + ".scaled_dot_product_attention_of_the_layer";
  }
  HistoryView view{"long", {{"a", history}}, {FPFormat::parse("e4m3fn"), FPFormat::parse("e5m2")}};
  const std::string page = with_script(HtmlReport("a").add(view).html(), R"(
const rows = all(".history-space .row"); out.numbers = rows.filter(r => [...r.querySelectorAll("text")].some(t => /^17|layers.17/.test(t.textContent))).length;
)");
  for (const char* size : {"--window-size=500,800", "--window-size=1400,800"}) {
    EXPECT_THAT(body_tag(open(page, std::string("--dump-dom ") + size)), HasSubstr("data-numbers=\"4\"")) << size;
  }
}

TEST(HtmlReport, APageThatIsBeingWrittenReloadsItself) {
  EXPECT_THAT(HtmlReport("a").reload_every(5).html(), HasSubstr("<body data-reload=\"5\">"));
  EXPECT_THAT(HtmlReport("a").html(), Not(HasSubstr("data-reload=\"")));
}

TEST(Svg, PicturesThatStandAloneHaveMargins) {
  EXPECT_THAT(svg::picture(100, 50, "", true), HasSubstr("width=\"136\" height=\"86\" viewBox=\"-18 -18 136 86\""));
  EXPECT_THAT(svg::picture(100, 50, "", false), HasSubstr("width=\"100\" height=\"50\" viewBox=\"0 0 100 50\""));
}

TEST(LineChart, ComparesAMeanWithWhatIsMeasuredRarely) {
  Curve loss{"loss", {}, {}}, held{"held-out data", {4, 3}, {10, 20}};
  for (int i = 1; i <= 20; ++i) loss.values.push_back(i % 2 ? 2 : 4), loss.steps.push_back(i);
  EXPECT_EQ(conclusion(LineChart{.curves = {loss, held}, .smooth = 4}),
            "**loss** ends lowest, at 3 (mean of the last 4 steps); **held-out data** at 3 (0.0% above).");
}

TEST(LineChart, SaysThePeakOfARate) {
  EXPECT_EQ(conclusion(LineChart{.curves = {{"rate", {0.001, 0.003, 0.002, 0}, {1, 10, 20, 30}}}, .peak = true}),
            "**rate** ends at 0 and began at 0.001; its peak is 0.003, at step 10.");
  EXPECT_EQ(conclusion(LineChart{.curves = {{"rate", {0.3, 0.3}, {1, 2}}}, .peak = true}),
            "**rate** is 0.3 at every step.");
}

}  // namespace
}  // namespace plumb
