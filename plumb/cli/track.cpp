// plumb track: the scale of every tensor and gradient in one run.
#include <CLI/CLI.hpp>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/html_report.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/inputs.h"
#include "plumb/core/error.h"
#include "plumb/numerics/format.h"
#include "plumb/transforms/track_scales.h"

namespace plumb::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string out, html, fwd = "E4M3", bwd = "E5M2";
  bool backward = false, json = false, all = false;
};

FPFormat format(const std::string& option, const std::string& text) {
  try {
    return FPFormat::parse(text);
  } catch (const Error& e) {
    throw UsageError(option + " " + text + ": " + e.message(), e.remedy().empty() ? option + " E4M3" : e.remedy());
  }
}

// A page that needs nothing else: the picture of every scale, and the numbers.
std::string page(const Options& o, const ScalesGraph& scales, const FPFormat& fwd, const FPFormat& bwd) {
  Table table{{"value", "module", "operator", "std", "largest", "gradient's std", "gradient's largest"}, {}};
  for (const ScaleNode& node : scales.nodes) {
    if (!node.metrics) continue;
    std::vector<std::string> row = {node.name, node.module, node.target, short_number(node.metrics->fwd.std),
                                    short_number(node.metrics->fwd.abs_max)};
    if (const auto& bwd_data = node.metrics->bwd) {
      row.push_back(short_number(bwd_data->std));
      row.push_back(short_number(bwd_data->abs_max));
    }
    table.rows.push_back(std::move(row));
  }
  HtmlReport report("Scales of " + o.model.file, o.backward ? "one forward and backward" : "one forward");
  report.section("Against " + o.fwd + (o.backward ? " and " + o.bwd : ""))
      .prose("Left the values, right their gradients, in powers of two. What lies outside of the band is lost.")
      .add(scale_chart("Scales", {{o.model.file, &scales}}, fwd, bwd));
  report.section("Numbers").add(table);
  return report.html();
}

void track(const Options& o) {
  const FPFormat fwd = format("--fwd", o.fwd), bwd = format("--bwd", o.bwd);
  check_writable("-o", o.out);
  check_writable("--html", o.html);
  Progress progress(3, o.json);
  Model model = open_model(o.model, progress);
  progress.next("running " + o.model.file);
  // Shares that a format loses are read off the histograms.
  const auto tracked = track_scales(model.loaded.program.module, {.histogram = !o.html.empty()});
  at::AutoGradMode gradients(o.backward);
  const std::vector<c10::IValue> outputs = tracked->run(std::move(model.inputs));
  if (o.backward) backward_start(*tracked, outputs).backward();
  progress.next("writing");
  ScalesGraph scales = scales_graph(*tracked);
  if (!o.html.empty()) {
    write_text(page(o, scales, fwd, bwd), o.html);
    progress.say("wrote " + o.html);
  }
  if (!o.all) scales = prune_non_float_tensors(scales);
  const std::string text = o.json ? scales.to_json() : scales.to_text();
  progress.finish();
  // The page alone, unless the numbers are asked for as well.
  if (o.html.empty() || o.json || !o.out.empty()) write_text(text, o.out);
}

}  // namespace

void add_track(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("track", "Measures the scale of every tensor and gradient in one run");
  add_model_options(sub, o->model);
  sub->add_flag("--backward", o->backward,
                "Measure gradients too, from the output named loss or the sum of all outputs");
  sub->add_flag("--all", o->all, "Show also what is no floating-point tensor");
  sub->add_option("--html", o->html,
                  "Write a page that holds everything: every scale against two formats, and a table");
  sub->add_option("--fwd", o->fwd, "The page's format of values (E4M3)");
  sub->add_option("--bwd", o->bwd, "The page's format of gradients (E5M2)");
  sub->add_option("-o,--out", o->out, "Write to a file instead of stdout");
  sub->add_flag("--json", o->json, "Print as JSON");
  sub->footer("Example:\n  plumb track model.pt2 --input x.pt --backward --html scales.html");
  sub->callback([o] { track(*o); });
}

}  // namespace plumb::cli
