#include "plumb/cli/history.h"

#include <iostream>
#include <sstream>

#include "plumb/analysis/html_report.h"
#include "plumb/cli/common.h"
#include "plumb/core/error.h"

namespace plumb::cli {
namespace {

constexpr size_t kMostRows = 100;  // of a page's table; the view shows every tensor

}  // namespace

nlohmann::ordered_json json_of(const Table& table) {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    nlohmann::ordered_json object;
    for (size_t c = 0; c < row.size(); ++c) object[table.header[c]] = row[c];
    rows.push_back(std::move(object));
  }
  return rows;
}

std::vector<FPFormat> read_formats(const std::string& option, const std::string& text) {
  std::vector<FPFormat> formats;
  std::istringstream in(text);
  for (std::string name; std::getline(in, name, ',');) {
    try {
      formats.push_back(FPFormat::parse(name));
    } catch (const Error& e) {
      throw UsageError(option + " " + name + ": " + e.message(), option + " e4m3fn,e5m2");
    }
  }
  if (formats.empty()) throw UsageError(option + ": names no format", option + " e4m3fn,e5m2");
  return formats;
}

std::string history_page(const HistoryView& view, const std::string& title, const std::string& subtitle) {
  HtmlReport report(title, subtitle);
  const auto charts = scalar_charts(view);
  if (!charts.empty()) {
    report.section("Course");
    for (const LineChart& chart : charts) report.add(chart);
  }
  report.section("Scales")
      .prose(
          "Values left, their gradients right, in powers of two; what lies outside of a format's band is lost. A click "
          "on a head sorts, a click on a tensor shows its histograms and what every format would do to it.")
      .add(view);
  if (Table events = event_table(view); !events.rows.empty()) report.section("Conditions").add(events);
  if (Table losses = format_table(view, 0, kMostRows); !losses.rows.empty()) {
    losses.caption =
        "Shares of elements; what loses most comes first (" + std::to_string(losses.rows.size()) + " rows)";
    report.section("What formats would do").add(losses);
  }
  return report.html();
}

void show_history(const HistoryOptions& o) {
  check_writable("-o", o.out);
  check_writable("--html", o.html);
  check_writable("--svg", o.svg);
  HistoryView view{"", {}, read_formats("--formats", o.formats)};
  view.runs.push_back({o.history, read_history(o.history)});
  if (!o.compare.empty()) view.runs.push_back({o.compare, read_history(o.compare)});
  for (const HistoryRun& run : view.runs) {
    const auto& steps = run.history.steps;
    if (!steps.empty() && o.step > steps.back().step) {
      const std::string last = std::to_string(steps.back().step);
      throw UsageError("--step " + std::to_string(o.step) + ": " + run.name + " ends at step " + last,
                       "--step " + last);
    }
    if (run.history.torn_bytes > 0) {
      std::cerr << "plumb: " << run.name << ": a last record of " << run.history.torn_bytes
                << " bytes was not written whole and is left out\n";
    }
  }
  if (!o.html.empty()) {
    const std::string subtitle = o.compare.empty() ? "" : "beside " + o.compare;
    write_text(history_page(view, "History of " + o.history, subtitle), o.html);
  }
  if (!o.svg.empty()) write_text(to_svg(scale_chart(view, o.step)), o.svg);
  if ((!o.html.empty() || !o.svg.empty()) && !o.json && o.out.empty()) return;
  const Table table = format_table(view, o.step);
  write_text(
      o.json ? json_of(table).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" : to_text(table),
      o.out);
}

}  // namespace plumb::cli
