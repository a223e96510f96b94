#include <cstdio>
#include <iostream>

#include "demo.h"
#include "plumb/analysis/adapters.h"
#include "plumb/analysis/html_report.h"
#include "plumb/schedule/generators.h"

namespace example {
namespace {

std::string number(double value, int digits = 3) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

plumb::Table table_of(const DemoResult& result) {
  plumb::Table table;
  table.header = {"run", "learning rate", "first loss", "final loss", "against FP32", "seconds"};
  const double fp32 = result.runs[0].tail();
  for (const RunResult& run : result.runs) {
    char change[32];
    std::snprintf(change, sizeof change, "%+.1f%%", 100 * (run.tail() / fp32 - 1));
    char lr[32];
    std::snprintf(lr, sizeof lr, "%g", run.lr);
    table.rows.push_back(
        {run.name, lr, number(run.losses.front()), number(run.tail()), change, number(run.seconds, 1)});
  }
  table.caption = "Final loss: mean of the last tenth of the steps, nats a byte";
  return table;
}

// Reshapes and the like say nothing of scales.
plumb::ScalesGraph interesting(const plumb::ScalesGraph& graph) {
  return plumb::prune_same_scale_tensors(plumb::prune_non_float_tensors(graph));
}

}  // namespace

std::vector<std::string> findings(const DemoResult& r) {
  const double fp32 = r.runs[0].tail(), plain = r.runs[1].tail(), scaled = r.runs[2].tail();
  std::vector<std::string> lines;
  lines.push_back(plain > 1.05 * fp32
                      ? "Plain FP8 loses: it ends " + number(100 * (plain / fp32 - 1), 1) + "% above FP32."
                      : "Plain FP8 shows no clear harm here: it ends within 5% of FP32.");
  lines.push_back(scaled <= 1.02 * fp32
                      ? "Unit-scaled FP8 ends " + number(100 * (scaled / fp32 - 1), 1) +
                            "% from FP32 (within 2% or better)."
                      : "Unit-scaled FP8 ends " + number(100 * (scaled / fp32 - 1), 1) + "% above FP32: more than 2%.");
  lines.push_back(r.equal ? "Over two processes every loss is bit for bit the one-process loss."
                          : "The two-process losses DIFFER from the one-process losses: this is a bug.");
  return lines;
}

void print_table(const DemoResult& result) {
  std::cout << "\n" << plumb::to_text(table_of(result)) << "\n";
  for (const std::string& line : findings(result)) std::cout << "- " << line << "\n";
}

void write_report(const DemoOptions& options, const DemoResult& result) {
  const auto fwd = plumb::FPFormat::parse("e4m3fn-RN"), bwd = plumb::FPFormat::parse("e5m2-RN");
  plumb::HtmlReport report("FP8 training by unit scaling",
                           "a byte-level GPT of " + std::to_string(options.model.layers) + " layers, width " +
                               std::to_string(options.model.width) + ", " + std::to_string(options.steps) +
                               " steps on real text");
  std::string prose;
  for (const std::string& line : findings(result)) prose += "- " + line + "\n";
  report.section("What came out").prose(prose).add(table_of(result));

  plumb::LineChart losses;
  losses.title = "Training loss";
  losses.y_label = "nats a byte";
  losses.smooth = std::max(1, options.steps / 30);
  for (const RunResult& run : result.runs)
    losses.curves.push_back({run.name, run.losses, {}, &run == &result.runs.back()});
  report.section("Loss").prose("The two-process run lies on the one-process run: the numbers are equal.").add(losses);

  const auto before = interesting(result.runs[1].scales), after = interesting(result.runs[2].scales);
  const auto scales =
      plumb::scale_chart("Every tensor and its gradient after training",
                         {{"before: plain FP8", &before}, {"after: unit-scaled FP8", &after}}, fwd, bwd);
  report.section("Scales")
      .prose(
          "Left the tensors against E4M3, right their gradients against E5M2, in powers of two. Unit scaling keeps "
          "both near 1.")
      .add(scales);

  // The last step as it ran, beside the table's own time line.
  plumb::TimelineChart time;
  time.title = "One training step over two processes";
  auto measured = plumb::timeline_of(result.timeline, "measured");
  measured.note = "bubble " + plumb::percent(plumb::measured_bubble(result.timeline));
  const auto table = plumb::make_schedule("1F1B", options.stages, options.microbatches, 1);
  const auto simulation = plumb::simulate_schedule(table);
  auto simulated = plumb::timeline_of(table, simulation, "simulated, equal stages");
  simulated.note = "bubble " + plumb::percent(simulation.bubble_rate());
  time.runs = {measured, simulated};
  report.section("Pipeline").add(time);
  report.write(options.out + "/report.html");
}

}  // namespace example
