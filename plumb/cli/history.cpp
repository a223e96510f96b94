#include "plumb/cli/history.h"

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "plumb/analysis/html_report.h"
#include "plumb/cli/common.h"
#include "plumb/core/error.h"

namespace plumb::cli {
nlohmann::ordered_json json_of(const Table& table) {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    nlohmann::ordered_json object;
    for (size_t c = 0; c < row.size(); ++c) object[table.header[c]] = row[c];
    rows.push_back(std::move(object));
  }
  return rows;
}

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

std::string layers_conclusion(const Table& layers) {
  return c10::str(
      "**", layers.rows.at(0)[0], "** is the worst of ", std::ranges::count(layers.levels, 0),
      " layers: ", layers.rows[0][1],
      " of its values and gradients lose 1 % or more. A layer shows its worst tensor; a click unfolds the others.");
}

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
  const Table table = format_table(view, o.step);
  write_text(
      o.json ? json_of(table).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" : to_text(table),
      o.out);
}

}  // namespace plumb::cli
