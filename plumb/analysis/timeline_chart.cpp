#include "plumb/analysis/timeline_chart.h"

#include <algorithm>
#include <map>
#include <set>

#include "plumb/analysis/svg.h"
#include "plumb/analysis/table.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

using svg::number;

constexpr size_t kMostActions = 200000;
constexpr int kMostRanks = 4096;
constexpr double kRankLabel = 60, kRight = 12;

struct Look {
  const char *name, *kind, *color;
};
constexpr Look kLooks[] = {{"forward", "F", "#3b82f6"},
                           {"backward, inputs", "I", "#14b8a6"},
                           {"backward, weights", "W", "#f59e0b"},
                           {"backward", "B", "#10b981"},
                           {"other", "", "#94a3b8"}};

size_t look_of(const std::string& kind) {
  for (size_t i = 0; i + 1 < std::size(kLooks); ++i) {
    if (kind == kLooks[i].kind) return i;
  }
  return std::size(kLooks) - 1;
}

// A run with what its drawing needs.
struct Laid {
  const TimelineRun* run;
  double begin = 0, end = 0;
  int ranks = 0;
  double factor = 1;  // from its unit to the shown one
  std::string unit;
  std::map<int, std::set<int>> stages;  // by rank
};

Laid laid(const TimelineRun& run, const TimelineChart& chart) {
  Laid out{&run};
  out.ranks = run.num_ranks;
  auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::InvalidArgument, "time line \"" + run.name + "\": " + what, chart.title);
  };
  if (run.actions.size() > kMostActions) {
    fail(std::to_string(run.actions.size()) + " actions are more than a viewer shows");
  }
  double begin = INFINITY;
  for (const TimelineAction& a : run.actions) {
    if (!std::isfinite(a.start) || !std::isfinite(a.end) || a.end < a.start) {
      fail("action " + a.kind + " of stage " + std::to_string(a.stage) + " runs from " + short_number(a.start) +
           " to " + short_number(a.end));
    }
    if (a.rank < 0) fail("action " + a.kind + " is on rank " + std::to_string(a.rank));
    begin = std::min(begin, std::isfinite(a.waiting) ? std::min(a.waiting, a.start) : a.start);
    out.end = std::max(out.end, a.end);
    out.ranks = std::max(out.ranks, a.rank + 1);
    out.stages[a.rank].insert(a.stage);
  }
  if (out.ranks > kMostRanks) fail(std::to_string(out.ranks) + " ranks are more than a picture shows");
  // Times since boot would leave the picture empty; a run that starts a little late is drawn so.
  if (begin < INFINITY && (begin < 0 || begin > (out.end - begin))) out.begin = begin;
  const double length = out.end - out.begin;
  out.unit = run.unit;
  if (run.unit == "s" && length > 0 && length < 1e-3) out.factor = 1e6, out.unit = "µs";
  if (run.unit == "s" && length >= 1e-3 && length < 1) out.factor = 1e3, out.unit = "ms";
  return out;
}

std::string action_of(const TimelineAction& a, const Laid& run, double scale, double row) {
  const double x = (a.start - run.begin) * scale, width = std::max((a.end - a.start) * scale, 0.4);
  const double top = a.half == 2 ? row / 2 : 1.5, height = a.half ? row / 2 - 1.5 : row - 3;
  const size_t look = look_of(a.kind);
  const std::string microbatch = a.microbatch < 0 ? "" : std::to_string(a.microbatch);
  auto time = [&](double t) { return short_number((t - run.begin) * run.factor); };
  std::string title = a.kind + microbatch + ": stage " + std::to_string(a.stage) +
                      (microbatch.empty() ? "" : ", microbatch " + microbatch) + ", rank " + std::to_string(a.rank) +
                      "\n" + time(a.start) + " to " + time(a.end) + " " + run.unit + " (" +
                      short_number((a.end - a.start) * run.factor) + ")";
  std::string out;
  const bool waited = std::isfinite(a.waiting) && a.waiting < a.start;
  if (waited) {
    title += "\nwaited " + short_number((a.start - a.waiting) * run.factor) + " " + run.unit;
    const double from = (a.waiting - run.begin) * scale;
    if (x - from > 0.5) {
      out += "<line class=\"waits\" stroke=\"#94a3b8\" stroke-width=\"1.5\" stroke-dasharray=\"2 2\" x1=\"" +
             number(from) + "\" x2=\"" + number(x) + "\" y1=\"" + number(row / 2) + "\" y2=\"" + number(row / 2) +
             "\"/>";
    }
  }
  // Later stages of a rank are fainter, so that chunks can be told apart.
  const auto& stages = run.stages.at(a.rank);
  const auto chunk = std::distance(stages.begin(), stages.find(a.stage));
  out += "<g><title>" + svg::escaped(title) + "</title><rect class=\"k" + std::to_string(look) + "\" fill=\"" +
         kLooks[look].color + "\" x=\"" + number(x) + "\" y=\"" + number(top) + "\" width=\"" +
         number(width > 3 ? width - 0.6 : width) + "\" height=\"" + number(height) + "\" rx=\"" +
         (width > 8 ? "2" : "0") + "\"" +
         (chunk ? " opacity=\"" + number(std::max(0.45, 1 - 0.3 * static_cast<double>(chunk))) + "\"" : "") + "/>";
  const double size = a.half ? 9 : 11;
  std::string label = a.kind + microbatch;
  if (svg::text_width(label, size) + 3 > width) label = microbatch;
  if (!label.empty() && svg::text_width(label, size) + 1 < width) {
    out += "<text class=\"on\" fill=\"white\" text-anchor=\"middle\" font-size=\"" + number(size) + "\" x=\"" +
           number(x + width / 2) + "\" y=\"" + number(top + height / 2 + size * 0.36) + "\">" + svg::escaped(label) +
           "</text>";
  }
  return out + "</g>";
}

std::string draw(const TimelineChart& chart, bool standalone) {
  std::vector<Laid> runs;
  std::map<std::string, double> longest;  // by unit
  std::set<size_t> looks;
  bool waits = false, chunks = false;
  double most_actions = 1;  // on a rank
  for (const TimelineRun& run : chart.runs) {
    runs.push_back(laid(run, chart));
    double& length = longest[run.unit];
    length = std::max(length, runs.back().end - runs.back().begin);
    std::map<int, double> count;
    for (const TimelineAction& a : run.actions) {
      looks.insert(look_of(a.kind));
      waits = waits || (std::isfinite(a.waiting) && a.waiting < a.start);
      most_actions = std::max(most_actions, ++count[a.rank]);
    }
    for (const auto& [rank, stages] : runs.back().stages) chunks = chunks || stages.size() > 1;
  }
  double width = std::max(200, chart.width);
  // On a page there is room to scroll.
  if (!standalone) width = std::clamp(most_actions * 13, width, 8000.0);
  const double plot = width - kRankLabel - kRight, row = std::max(8, chart.row_height);

  std::string body;
  double y = 0;
  if (standalone && !chart.title.empty())
    body += svg::text(0, y += 18, chart.title, {"text", "start", 15, true}), y += 6;
  double x = 0;
  y += 14;
  for (size_t look : looks) {
    body += "<rect class=\"k" + std::to_string(look) + "\" fill=\"" + kLooks[look].color + "\" x=\"" + number(x) +
            "\" y=\"" + number(y - 10) + "\" width=\"12\" height=\"12\" rx=\"2\"/>" +
            svg::text(x + 17, y, std::string(kLooks[look].kind) + (*kLooks[look].kind ? " " : "") + kLooks[look].name,
                      {"text", "start", 12});
    x += 44 + svg::text_width(kLooks[look].name, 12);
  }
  if (waits) {
    body += "<line class=\"waits\" stroke=\"#94a3b8\" stroke-width=\"1.5\" stroke-dasharray=\"2 2\" x1=\"" + number(x) +
            "\" x2=\"" + number(x + 18) + "\" y1=\"" + number(y - 4) + "\" y2=\"" + number(y - 4) + "\"/>" +
            svg::text(x + 23, y, "waits for a message");
    x += 150;
  }
  if (chunks) body += svg::text(x, y, "fainter: a rank's later stages", {"muted", "start", 12});
  y += 10;

  for (const Laid& run : runs) {
    const double length = longest[run.run->unit], scale = length > 0 ? plot / length : 0;
    y += 22;
    body += svg::text(0, y, run.run->name, {"text", "start", 13, true});
    if (!run.run->note.empty()) {
      body += svg::text(svg::text_width(run.run->name, 13) + 18, y, run.run->note, {"muted", "start", 12});
    }
    y += 8;
    std::vector<std::string> rows(static_cast<size_t>(run.ranks));
    for (const TimelineAction& a : run.run->actions) {
      rows[static_cast<size_t>(a.rank)] += action_of(a, run, scale, row) + "\n";
    }
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      body += svg::text(0, y + row / 2 + 4, "rank " + std::to_string(rank), {"muted", "start", 11.5});
      body += "<g transform=\"translate(" + number(kRankLabel) + " " + number(y) +
              ")\"><rect class=\"lane\" fill=\"#f1f5f9\" " + "width=\"" + number((run.end - run.begin) * scale) +
              "\" y=\"1.5\" height=\"" + number(row - 3) + "\"/>" + rows[rank] + "</g>\n";
      y += row;
    }
    if (run.end > run.begin) {
      for (double t : svg::ticks(0, (run.end - run.begin) * run.factor, 8)) {
        const double at = kRankLabel + t / run.factor * scale;
        body += svg::line(at, y, at, y + 4, "axis");
        body += svg::text(at, y + 16, short_number(t) + (t > 0 && !run.unit.empty() ? " " + run.unit : ""),
                          {"muted", "middle", 10.5});
      }
    }
    y += 22;
  }
  return svg::picture(width, y + 4, body, standalone);
}

}  // namespace

std::string to_svg(const TimelineChart& chart) { return draw(chart, true); }

std::string to_html(const TimelineChart& chart) {
  std::string out = "<figure class=\"timeline-chart\">\n";
  if (!chart.title.empty()) out += "<h3>" + svg::escaped(chart.title) + "</h3>\n";
  return out + "<div class=\"wide\">" + draw(chart, false) + "</div>\n</figure>\n";
}

}  // namespace plumb
