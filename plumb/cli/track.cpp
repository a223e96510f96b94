// plumb track: the scale of every tensor and gradient in one run.
#include <CLI/CLI.hpp>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/html_report.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/history.h"
#include "plumb/cli/inputs.h"
#include "plumb/core/error.h"
#include "plumb/numerics/format.h"
#include "plumb/transforms/track_scales.h"

namespace plumb::cli {
namespace {

struct TrackArguments {
  ModelOptions model;
  HistoryOptions history;  // also --html, --svg, -o and --json of one run
  std::string fwd = "E4M3", bwd = "E5M2", formats;
  bool backward = false, all = false;
};

FPFormat format(const std::string& option, const std::string& text) {
  try {
    return FPFormat::parse(text);
  } catch (const Error& e) {
    throw UsageError(option + " " + text + ": " + e.message(), e.remedy().empty() ? option + " E4M3" : e.remedy());
  }
}

// A page that needs nothing else: the picture of every scale, the numbers, and what formats would do.
std::string page(const TrackArguments& o, const ScalesGraph& scales, const HistoryView& view) {
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
      .add(view);
  report.section("Numbers").add(table);
  report.section("What formats would do")
      .prose("Shares of elements; what loses most comes first.")
      .add(format_table(view, 0, 100));
  return report.html();
}

void track_history(const TrackArguments& o) {
  if (!o.model.file.empty() || !o.model.inputs.empty()) {
    throw UsageError("--history: shows what was recorded and takes no FILE and no --input",
                     "plumb track --history " + o.history.history);
  }
  HistoryOptions history = o.history;
  if (!o.formats.empty()) history.formats = o.formats;
  show_history(history);
}

void track(const TrackArguments& o) {
  if (!o.history.history.empty()) return track_history(o);
  if (!o.history.compare.empty()) throw UsageError("--compare: there is nothing to compare it with", "--history FILE");
  if (o.model.file.empty())
    throw UsageError("FILE is missing", "plumb track model.pt2 --input x.pt, or --history FILE");
  const FPFormat fwd = format("--fwd", o.fwd), bwd = format("--bwd", o.bwd);
  std::vector<FPFormat> formats = {fwd, bwd};
  if (!o.formats.empty()) formats = read_formats("--formats", o.formats);
  const std::string &html = o.history.html, &svg = o.history.svg, &out = o.history.out;
  const bool json = o.history.json;
  check_writable("-o", out);
  check_writable("--html", html);
  check_writable("--svg", svg);
  Progress progress(3, json);
  Model model = open_model(o.model, progress);
  progress.next("running " + o.model.file);
  // Shares that a format loses are read off the histograms.
  const bool histogram = !html.empty() || !svg.empty() || !o.formats.empty();
  const auto tracked = track_scales(model.loaded.program.module, {.histogram = histogram});
  at::AutoGradMode gradients(o.backward);
  const std::vector<c10::IValue> outputs = tracked->run(std::move(model.inputs));
  if (o.backward) backward_start(*tracked, outputs).backward();
  progress.next("writing");
  ScalesGraph scales = scales_graph(*tracked);
  const HistoryView view{"", {{o.model.file, history_of(scales)}}, formats};
  if (!html.empty()) {
    write_text(page(o, scales, view), html);
    progress.say("wrote " + html);
  }
  if (!svg.empty()) {
    write_text(to_svg(scale_chart(view)), svg);
    progress.say("wrote " + svg);
  }
  if (!o.all) scales = prune_non_float_tensors(scales);
  std::string text = json ? scales.to_json() : scales.to_text();
  if (!o.formats.empty()) {
    const Table table = format_table(view);
    if (json) {
      auto document = nlohmann::ordered_json::parse(text);
      document["formats"] = json_of(table);
      text = document.dump(1);
    } else {
      text += "\n" + to_text(table);
    }
  }
  progress.finish();
  // The page and the picture alone, unless the numbers are asked for as well.
  if ((html.empty() && svg.empty()) || json || !out.empty()) write_text(text, out);
}

}  // namespace

void add_track(CLI::App& app) {
  auto o = std::make_shared<TrackArguments>();
  CLI::App* sub = app.add_subcommand("track", "Measures the scale of every tensor and gradient in one run");
  add_model_options(sub, o->model);
  sub->add_flag("--backward", o->backward,
                "Measure gradients too, from the output named loss or the sum of all outputs");
  sub->add_flag("--all", o->all, "Show also what is no floating-point tensor");
  sub->add_option("--html", o->history.html,
                  "Write a page that holds everything: every scale against formats, histograms, tables, steps");
  sub->add_option("--svg", o->history.svg, "Write the picture of every scale, for papers");
  sub->add_option("--fwd", o->fwd, "The page's format of values (E4M3)");
  sub->add_option("--bwd", o->bwd, "The page's format of gradients (E5M2)");
  sub->add_option("--formats", o->formats,
                  "Say what each of these formats would do to each tensor: e4m3fn,e5m2 (instead of --fwd and --bwd)");
  sub->add_option("--history", o->history.history, "Show a recorded training instead of running FILE");
  sub->add_option("--compare", o->history.compare, "A second history, side by side");
  sub->add_option("--step", o->history.step, "Of a history: the step of --svg and of the table (the last)")
      ->check(CLI::PositiveNumber);
  sub->add_option("-o,--out", o->history.out, "Write to a file instead of stdout");
  sub->add_flag("--json", o->history.json, "Print as JSON");
  sub->footer(
      "Example:\n  plumb track model.pt2 --input x.pt --backward --html scales.html\n  plumb track --history "
      "run.history "
      "--formats e4m3fn,e5m2 --html run.html");
  sub->get_option("FILE")->required(false);
  sub->callback([o] { track(*o); });
}

}  // namespace plumb::cli
