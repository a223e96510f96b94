// plumb track: the scale of every tensor and gradient in one run; with --history, those that a recorder kept.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/history_view.h"
#include "plumb/analysis/html_report.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/graph/backward_errors.h"
#include "plumb/numerics/format.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb::cli {
namespace {

struct HistoryOptions {
  std::string history;               // a file, or NAME=FILE
  std::vector<std::string> compare;  // more of them, drawn beside it
  // The formats of values and of gradients, and what else is asked for: "e4m3fn,e5m2".
  std::string fwd = "E4M3", bwd = "E5M2", formats;
  std::string html, svg, out;
  int64_t step = 0;  // 0: the last
  bool json = false;
};

// Returns the number in a cell of a column of numbers, a percentage as a share; the text of any other cell.
nlohmann::ordered_json json_of(const std::string& cell) {
  const bool share = cell.ends_with('%');
  const auto number = nlohmann::ordered_json::parse(cell.substr(0, cell.size() - share), nullptr, false);
  if (!number.is_number()) return cell;
  return share ? nlohmann::ordered_json(number.get<double>() / 100) : number;
}

// Returns a table's rows as JSON objects.
nlohmann::ordered_json json_of(const Table& table) {
  std::vector<bool> numeric;
  for (size_t c = 0; c < table.header.size(); ++c) numeric.push_back(table.is_numeric(c));
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    nlohmann::ordered_json object;
    for (size_t c = 0; c < row.size(); ++c) {
      object[table.header[c]] = numeric[c] ? json_of(row[c]) : nlohmann::ordered_json(row[c]);
    }
    rows.push_back(std::move(object));
  }
  return rows;
}

// Sets the formats of roles and those asked for. UsageError names the option.
void read_formats(HistoryView& view, const HistoryOptions& o) {
  auto parse = [](const std::string& option, const std::string& text, const std::string& remedy) {
    return used_by(option + " " + text, [&] { return FPFormat::parse(text); }, option + " " + remedy);
  };
  view.formats = {parse("--fwd", o.fwd, "E4M3"), parse("--bwd", o.bwd, "E5M2")};
  for (const std::string& name : split_commas(o.formats)) view.asked.push_back(parse("--formats", name, "e4m3fn,e5m2"));
  if (!o.formats.empty() && view.asked.empty()) {
    throw UsageError("--formats " + o.formats + ": names no format", "--formats e4m3fn,e5m2");
  }
}

// Returns the sentence before a layer_table() that has rows.
std::string layers_conclusion(const Table& layers) {
  return c10::str(
      "**", layers.rows.at(0)[0], "** is the worst of ", std::ranges::count(layers.levels, 0),
      " layers: ", layers.rows[0][1],
      " of its values and gradients lose 1 % or more. A layer shows its worst tensor; a click unfolds the others.");
}

// Returns a page of everything there is to see.
std::string history_page(const HistoryView& view, const std::string& title, const std::string& subtitle) {
  HtmlReport report(title, subtitle);
  std::vector<std::string> names;
  for (const HistoryRun& run : view.runs) names.push_back(run.name);
  report.runs(names);
  const auto charts = scalar_charts(view);
  if (!charts.empty()) report.section("Course");
  for (const LineChart& chart : charts) {
    report.prose((charts.size() > 1 ? "`" + chart.title + "`: " : "") + conclusion(chart)).add(chart);
  }
  report.section("Scales").prose(conclusion(view)).add(view);
  if (Table events = event_table(view); !events.rows.empty()) {
    report.section("Conditions")
        .prose(c10::str("Conditions of rules held ", events.rows.size(), " times, first at step ",
                        events.rows.front()[1], ": ", events.rows.front()[2], "."))
        .add(events);
  }
  if (const Table losses = layer_table(view); !losses.rows.empty()) {
    report.section("What formats would do, by layer").prose(layers_conclusion(losses)).add(losses);
  }
  return report.html();
}

// Writes what the options ask for; without --html and --svg, or with -o or --json, the effect of each format, or,
// without histograms, the statistics that were recorded. The text also has the steps at which rules' conditions held.
void show_history(const HistoryOptions& o) {
  std::vector<std::string> inputs = o.compare;
  inputs.push_back(o.history);
  check_writable({{"-o", o.out}, {"--html", o.html}, {"--svg", o.svg}}, inputs);
  HistoryView view;
  read_formats(view, o);
  for (size_t i = 0; i <= o.compare.size(); ++i) {
    const std::string& text = i ? o.compare[i - 1] : o.history;
    // A file of that name goes before a name and a file.
    const size_t sign = std::filesystem::exists(text) ? std::string::npos : text.find('=');
    const std::string path = sign == std::string::npos ? text : text.substr(sign + 1);
    const std::string name = sign == std::string::npos ? text : text.substr(0, sign);
    for (const HistoryRun& run : view.runs) {
      if (run.name == name) throw UsageError("--compare " + text + ": is drawn already", "--compare NAME=" + path);
    }
    view.runs.push_back({name, read_history(path)});
  }
  for (const HistoryRun& run : view.runs) {
    const auto& steps = run.history.steps;
    if (!steps.empty() && o.step > steps.back().step) {
      const std::string last = std::to_string(steps.back().step);
      throw UsageError(c10::str("--step ", o.step, ": ", run.name, " ends at step ", last), "--step " + last);
    }
    if (run.history.torn_bytes > 0) {
      std::cerr << "plumb: " << run.name << ": a last record of " << run.history.torn_bytes
                << " bytes was not written whole and is left out\n";
    }
  }
  if (!o.html.empty()) {
    std::string others;
    for (size_t i = 1; i < view.runs.size(); ++i) others += (i > 1 ? ", " : "beside ") + view.runs[i].name;
    write_text(history_page(view, "History of " + view.runs[0].name, others), o.html);
  }
  if (!o.svg.empty()) write_text(to_svg(scale_chart(view, o.step)), o.svg);
  if ((!o.html.empty() || !o.svg.empty()) && !o.json && o.out.empty()) return;
  Table table = format_table(view, o.step);
  if (table.rows.empty()) {
    std::cerr << "plumb: " << conclusion(view, o.step) << "\n";
    table = statistics_table(view, o.step);
  }
  if (o.json)
    return write_text(json_of(table).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n", o.out);
  const Table events = event_table(view);
  write_text(to_text(table) + (events.rows.empty() ? "" : "\n" + to_text(events)), o.out);
}

struct TrackArguments {
  ModelOptions model;
  HistoryOptions history;  // also --html, --svg, -o and --json of one run
  bool backward = false, all = false, same_scale = false;
  std::vector<std::string> prune;
};

// A page that needs nothing else: the picture of every scale, what formats would do, and the numbers.
std::string page(const TrackArguments& o, const ScalesGraph& scales, const HistoryView& view) {
  Table table{{"value", "module", "operator or name", "std", "largest"}, {}};
  if (o.backward) table.header.insert(table.header.end(), {"gradient's std", "gradient's largest"});
  const ScaleNode *largest = nullptr, *smallest = nullptr;
  for (const ScaleNode& node : scales.nodes) {
    if (!node.metrics) continue;
    std::vector<std::string> row = {node.name, node.module, node.target, short_number(node.metrics->fwd.std),
                                    short_number(node.metrics->fwd.abs_max)};
    if (const auto& bwd_data = node.metrics->bwd) {
      row.push_back(short_number(bwd_data->std));
      row.push_back(short_number(bwd_data->abs_max));
    }
    table.rows.push_back(std::move(row));
    const double std = node.metrics->fwd.std;
    if (std > 0 && (!largest || std > largest->metrics->fwd.std)) largest = &node;
    if (std > 0 && (!smallest || std < smallest->metrics->fwd.std)) smallest = &node;
  }
  HtmlReport report("Scales of " + o.model.file, o.backward ? "one forward and backward" : "one forward");
  report.section("Against " + o.history.fwd + (o.backward ? " and " + o.history.bwd : ""))
      .prose(conclusion(view))
      .add(view);
  if (const Table losses = layer_table(view); !losses.rows.empty()) {
    report.section("By layer").prose(layers_conclusion(losses)).add(losses);
  }
  report.section("Numbers")
      .prose(largest ? "Standard deviations of values go from " + short_number(smallest->metrics->fwd.std) + " (`" +
                           smallest->name + "`) to " + short_number(largest->metrics->fwd.std) + " (`" + largest->name +
                           "`)."
                     : "No value varies.")
      .add(table);
  return report.html();
}

void track(const TrackArguments& o) {
  if (!o.history.history.empty()) {
    if (!o.model.file.empty() || !o.model.inputs.empty())
      throw UsageError("--history: shows what was recorded and takes no FILE and no --input",
                       "plumb track --history " + o.history.history);
    return show_history(o.history);
  }
  if (!o.history.compare.empty()) throw UsageError("--compare: there is nothing to compare it with", "--history FILE");
  if (o.model.file.empty())
    throw UsageError("FILE is missing", "plumb track model.pt2 --input x.pt, or --history FILE");
  HistoryView view;
  read_formats(view, o.history);
  const std::string &html = o.history.html, &svg = o.history.svg, &out = o.history.out;
  const bool json = o.history.json;
  check_writable({{"-o", out}, {"--html", html}, {"--svg", svg}}, files_of(o.model));
  Progress progress(3, json);
  Model model = open_model(o.model, progress);
  progress.next("running " + o.model.file);
  // Shares that a format loses are read off the histograms.
  const bool histogram = !html.empty() || !svg.empty() || !view.asked.empty();
  const auto tracked = track_scales(model.loaded.program.module, {.histogram = histogram});
  at::AutoGradMode gradients(o.backward);
  const std::vector<c10::IValue> outputs = tracked->run(std::move(model.inputs));
  if (o.backward) run_backward_of(tracked->graph(), [&] { backward_start(*tracked, outputs).backward(); });
  progress.next("writing");
  ScalesGraph scales = scales_graph(*tracked);
  view.runs.push_back({o.model.file, history_of(scales)});
  if (!html.empty()) {
    write_text(page(o, scales, view), html);
    say_wrote(progress, html);
  }
  if (!svg.empty()) {
    write_text(to_svg(scale_chart(view)), svg);
    say_wrote(progress, svg);
  }
  if (!o.all) scales = prune_non_float_tensors(scales);
  if (o.same_scale) scales = prune_same_scale_tensors(scales);
  for (const std::string& target : o.prune) {
    if (prune_selected_nodes(scales, std::vector{target}).nodes.size() == scales.nodes.size())
      std::cerr << "plumb: --prune " << target << ": no node is one; the column 'target' has the names" << std::endl;
  }
  if (!o.prune.empty()) scales = prune_selected_nodes(scales, o.prune);
  std::string text = json ? scales.to_json() : scales.to_text();
  if (!view.asked.empty()) {
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
  sub->add_flag("--prune-same-scale", o->same_scale, "Leave out what has the scale of its only input, both ways");
  sub->add_option("--prune", o->prune, "Leave out these operators, parameters or inputs: aten::add,wte.weight")
      ->delimiter(',')
      ->allow_extra_args(false);
  sub->add_option("--html", o->history.html,
                  "Write a page that holds everything: every scale against formats, histograms, tables, steps");
  sub->add_option("--svg", o->history.svg, "Write the picture of every scale, for papers");
  sub->add_option("--fwd", o->history.fwd, "The format that values are held against")->capture_default_str();
  sub->add_option("--bwd", o->history.bwd, "The format that gradients are held against")->capture_default_str();
  sub->add_option("--formats", o->history.formats,
                  "Say too what each of these would do to each tensor and each gradient: e3m4,fp16");
  sub->add_option("--history", o->history.history,
                  "Show a recorded training, FILE or NAME=FILE, instead of running FILE");
  sub->add_option("--compare", o->history.compare, "Further histories, FILE or NAME=FILE, side by side; up to seven")
      ->allow_extra_args(false);
  sub->add_option("--step", o->history.step, "The step of a history that --svg and the table show (the last)")
      ->check(whole_number(1, std::numeric_limits<int64_t>::max()));
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
