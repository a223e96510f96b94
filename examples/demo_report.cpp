#include <cmath>
#include <cstdio>
#include <iostream>

#include "demo.h"
#include "plumb/analysis/adapters.h"
#include "plumb/analysis/html_report.h"
#include "plumb/schedule/generators.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace example {
namespace {

std::string number(double value, int digits = 3) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// "6.1 % below FP32", "10.3 % above FP32", "as low as FP32"
std::string against_fp32(double loss, double fp32) {
  const double change = 100 * (loss / fp32 - 1);
  if (std::fabs(change) < 0.05) return "at FP32's loss";
  return number(std::fabs(change), 1) + " % " + (change < 0 ? "below" : "above") + " FP32";
}

plumb::Table table_of(const DemoResult& result) {
  plumb::Table table;
  table.header = {"run", "learning rate", "first loss", "final loss", "change", "seconds"};
  const double fp32 = result.runs[0].tail();
  for (const RunResult& run : result.runs) {
    char lr[32];
    std::snprintf(lr, sizeof lr, "%g", run.lr);
    table.rows.push_back({run.name, lr, number(run.losses.front()), number(run.tail()),
                          &run == &result.runs[0] ? "" : against_fp32(run.tail(), fp32), number(run.seconds, 1)});
  }
  table.caption = "Final loss: mean of the last tenth of the steps, nats a byte";
  return table;
}

// Returns the settings of each training, so that nobody has to read the program for them.
plumb::Table settings_of(const DemoOptions& o, const DemoResult& result) {
  auto text = [](double v) {
    char out[32];
    std::snprintf(out, sizeof out, "%g", v);
    return std::string(out);
  };
  std::string rates;
  for (size_t i = 0; i < 3; ++i) {
    rates += (i ? ", " : "") + text(result.runs[i].lr) + " (" + result.runs[i].name + ")";
  }
  return {{"setting", "value"},
          {{"model", "byte-level GPT: " + std::to_string(o.model.layers) + " layers, width " +
                         std::to_string(o.model.width) + ", " + std::to_string(o.model.heads) + " heads, context " +
                         std::to_string(o.model.context)},
           {"text", o.text},
           {"steps", std::to_string(o.steps) + " of " + std::to_string(o.batch) + " rows, in " +
                         std::to_string(o.microbatches) + " microbatches"},
           {"optimizer", "AdamW; the rate warms up over the first tenth of the steps and then falls as a cosine to 0"},
           {"learning rates", rates + ": each run's best of a sweep"},
           {"formats", "values E4M3, gradients E5M2, rounded to nearest, in every matrix product"},
           {"tau", "attention " + text(o.tau_attention) + ", feed-forward " + text(plumb::UnitScaleOptions().tau_mlp) +
                       ": the weight of a residual branch" +
                       (o.tau_attention == plumb::UnitScaleOptions().tau_attention ? "; unit_scale's defaults" : "")},
           {"pipeline", std::to_string(o.stages) +
                            " stages, 1F1B, a process and a thread each; in the last run FP8 between the stages"},
           {"seed", std::to_string(o.seed)}}};
}

}  // namespace

// Returns the verdict on a recipe, made before a step was trained in it, and whether the run came out so.
std::string verdict_on(const DemoResult& r, const std::string& recipe, const RunResult& run) {
  for (const plumb::RecipeVerdict& found : r.runs[0].verdict.recipes) {
    if (found.name != recipe || !found.problem.empty()) continue;
    const bool loses = run.tail() > r.runs[0].tail() + 0.05, warned = found.error.verdict() != plumb::VerdictClass::Ok;
    return run.name + " \"" + std::string(to_string(found.error.verdict())) + "\" (" +
           (loses == warned ? "so it came out" : "it came out otherwise") + ")";
  }
  return run.name + ": none";
}

std::vector<std::string> findings(const DemoResult& r) {
  const double fp32 = r.runs[0].tail(), plain = r.runs[1].tail(), scaled = r.runs[2].tail();
  std::vector<std::string> lines;
  lines.push_back("Plain FP8 ends " + against_fp32(plain, fp32) +
                  (plain > 1.05 * fp32 ? ": it loses." : ": it shows no clear harm here."));
  lines.push_back("Unit-scaled FP8 ends " + against_fp32(scaled, fp32) +
                  (scaled > 1.02 * fp32 ? ": that is more than 2 %." : "."));
  lines.push_back("The verdict from four steps of FP32: " + verdict_on(r, "fp8", r.runs[1]) + ", " +
                  verdict_on(r, "unit-fp8", r.runs[2]) + ".");
  lines.push_back(r.equal ? "Over two processes every loss is bit for bit the one-process loss."
                          : "The two-process losses DIFFER from the one-process losses: this is a bug.");
  const double apart = 100 * (r.runs[4].tail() / scaled - 1);
  lines.push_back("FP8 that is multiplied, and sent between the stages in " + number(100 * r.bytes_sent, 0) +
                  " % of the bytes, ends " + number(std::fabs(apart), 2) + " % " + (apart < 0 ? "below" : "above") +
                  " the simulated one.");
  return lines;
}

void print_table(const DemoResult& result) {
  std::cout << "\n" << plumb::to_text(table_of(result)) << "\n";
  for (const std::string& line : findings(result)) std::cout << "- " << line << "\n";
}

void write_report(const DemoOptions& options, const DemoResult& result) {
  plumb::HtmlReport report("FP8 training by unit scaling",
                           "a byte-level GPT of " + std::to_string(options.model.layers) + " layers, width " +
                               std::to_string(options.model.width) + ", " + std::to_string(options.steps) +
                               " steps on real text");
  std::vector<std::string> names;
  for (const RunResult& run : result.runs) names.push_back(run.name);
  report.runs(names);
  std::string prose;
  for (const std::string& line : findings(result)) prose += "- " + line + "\n";
  report.section("What came out").prose(prose).add(table_of(result));

  plumb::LineChart losses;
  losses.y_label = "nats a byte";
  losses.smooth = std::max(1, options.steps / 10);  // as in the table
  for (const RunResult& run : result.runs) {
    losses.curves.push_back({run.name, run.losses, {}, &run == &result.runs.back()});
  }
  report.section("Training loss").prose(plumb::conclusion(losses)).add(losses);

  // Reshapes and the like say nothing of scales.
  plumb::HistoryView scales{"Every tensor left, its gradient right, in powers of two",
                            {},
                            {plumb::FPFormat::parse("e4m3fn-RN"), plumb::FPFormat::parse("e5m2-RN")}};
  for (const RunResult* run : {&result.runs[1], &result.runs[2]}) {
    const auto graph = plumb::prune_same_scale_tensors(plumb::prune_non_float_tensors(run->scales));
    scales.runs.push_back({run->name, plumb::history_of(graph, options.steps)});
  }
  report.section("Scales after training")
      .prose(plumb::conclusion(scales))
      .add(scales)
      .prose("By layer, the worst first; a click on a row shows its tensors.")
      .add(plumb::layer_table(scales));

  report.section("Verdict")
      .prose("Before a step was trained in FP8, from " + std::to_string(result.runs[0].verdict.gradients) +
             " gradients on FP32's path: " + result.runs[0].verdict.conclusion())
      .add(result.runs[0].verdict.table());

  const auto table = plumb::make_schedule("1F1B", options.stages, options.microbatches, 1);
  const plumb::MeasuredStep step = plumb::measured_step(table, result.timeline);
  report.section("Pipeline").prose(step.conclusion).add(step.chart);
  report.section("Settings")
      .prose("What the demo was told, beside the library's defaults.")
      .add(settings_of(options, result));
  report.write(options.out + "/report.html");
}

}  // namespace example
