#include "plumb/analysis/timeline_chart.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "plumb/analysis/svg.h"
#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/table.h"

namespace plumb {
namespace {

using svg::number;

constexpr size_t kMostActions = 200000;
constexpr int kMostRanks = 4096;
constexpr double kRankLabel = 60, kRight = 12;

struct Look {
  const char *name, *kind, *color;
};
// Pale, beside the colors of runs.
constexpr Look kLooks[] = {{"forward", "F", "#9db8d9"},
                           {"backward of inputs", "I", "#c3b1e1"},
                           {"backward of weights", "W", "#e8cf8e"},
                           {"backward", "B", "#a5cfb3"},
                           {"other", "", "#b8c2d0"}};

constexpr const char* kWaitLine = "class=\"waits\" stroke=\"#94a3b8\" stroke-width=\"1.5\" stroke-dasharray=\"2 2\"";

size_t look_of(const std::string& kind) {
  for (size_t i = 0; i + 1 < std::size(kLooks); ++i) {
    if (kind == kLooks[i].kind) return i;
  }
  return std::size(kLooks) - 1;
}

std::string swatch(size_t look) {
  return "class=\"k" + std::to_string(look) + "\" fill=\"" + kLooks[look].color + "\"";
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
  if (a.sent > 0) title += "\nsent " + std::to_string(a.sent) + " bytes";
  if (waited) {
    title += "\nwaited " + short_number((a.start - a.waiting) * run.factor) + " " + run.unit;
    const double from = (a.waiting - run.begin) * scale;
    if (x - from > 0.5) {
      out += svg::line(kWaitLine, from, row / 2, x, row / 2);
    }
  }
  // Later stages of a rank are fainter, so that chunks can be told apart.
  const auto& stages = run.stages.at(a.rank);
  const auto chunk = std::distance(stages.begin(), stages.find(a.stage));
  const double opacity = std::max(0.45, 1 - 0.3 * static_cast<double>(chunk));
  out +=
      "<g><title>" + svg::escaped(title) + "</title>" +
      svg::rect(swatch(look) + (width > 8 ? " rx=\"2\"" : "") + (chunk ? " opacity=\"" + number(opacity) + "\"" : ""),
                x, top, width > 3 ? width - 0.6 : width, height);
  const double size = a.half ? 9 : 11;
  std::string label = a.kind + microbatch;
  if (svg::text_width(label, size) + 3 > width) label = microbatch;
  if (!label.empty() && svg::text_width(label, size) + 1 < width) {
    out += svg::text(x + width / 2, top + height / 2 + size * 0.36, label, {"on", "middle", size});
  }
  return out + "</g>";
}

// All runs of a chart, and what is common to them.
struct Sheet {
  std::vector<Laid> runs;
  std::map<std::string, double> longest;  // by unit
  std::set<size_t> looks;
  bool waits = false, chunks = false;
  double most_actions = 1;  // on a rank

  double scale(const Laid& run, double width) const {
    const double length = longest.at(run.run->unit);
    return length > 0 ? width / length : 0;
  }
};

Sheet sheet_of(const TimelineChart& chart) {
  Sheet out;
  for (const TimelineRun& run : chart.runs) {
    out.runs.push_back(laid(run, chart));
    double& length = out.longest[run.unit];
    length = std::max(length, out.runs.back().end - out.runs.back().begin);
    std::map<int, double> count;
    for (const TimelineAction& a : run.actions) {
      out.looks.insert(look_of(a.kind));
      out.waits = out.waits || (std::isfinite(a.waiting) && a.waiting < a.start);
      out.most_actions = std::max(out.most_actions, ++count[a.rank]);
    }
    for (const auto& [rank, stages] : out.runs.back().stages) out.chunks = out.chunks || stages.size() > 1;
  }
  return out;
}

std::string look_text(size_t look) {
  return std::string(kLooks[look].kind) + (*kLooks[look].kind ? " " : "") + kLooks[look].name;
}

constexpr const char* kFainter = "fainter: a rank's later stages";
constexpr const char* kWaits = "waits for a message";
constexpr double kAxis = 22;  // below the lanes

std::string ranks_of(const Laid& run, double top, double row) {
  std::string out;
  for (int rank = 0; rank < run.ranks; ++rank) {
    out += svg::text(0, top + row * rank + row / 2 + 4, "rank " + std::to_string(rank), {"muted", "start", 11.5});
  }
  return out;
}

std::string lanes_of(const Laid& run, double left, double top, double row, double scale) {
  std::vector<std::string> rows(static_cast<size_t>(run.ranks));
  for (const TimelineAction& a : run.run->actions) {
    rows[static_cast<size_t>(a.rank)] += action_of(a, run, scale, row) + "\n";
  }
  std::string out;
  double y = top;
  for (const std::string& actions : rows) {
    out += "<g transform=\"translate(" + number(left) + " " + number(y) + ")\">" +
           svg::rect(R"(class="lane" fill="#f1f5f9")", 0, 1.5, (run.end - run.begin) * scale, row - 3) + actions +
           "</g>\n";
    y += row;
  }
  if (run.end > run.begin) {
    for (double t : svg::ticks(0, (run.end - run.begin) * run.factor, 8)) {
      const double at = left + t / run.factor * scale;
      out += svg::line(R"(class="axis" stroke="#94a3b8")", at, y, at, y + 4);
      out += svg::text(at, y + 16, short_number(t) + (t > 0 && !run.unit.empty() ? " " + run.unit : ""),
                       {"muted", "middle", 10.5});
    }
  }
  return out;
}

std::string legend_of(const Sheet& sheet, double y) {
  std::string out;
  double x = 0;
  for (size_t look : sheet.looks) {
    out += svg::rect(swatch(look) + " rx=\"2\"", x, y - 10, 12, 12) +
           svg::text(x + 17, y, look_text(look), {"text", "start", 12});
    x += 44 + svg::text_width(kLooks[look].name, 12);
  }
  if (sheet.waits) {
    out += svg::line(kWaitLine, x, y - 4, x + 18, y - 4) + svg::text(x + 23, y, kWaits);
    x += 150;
  }
  if (sheet.chunks) out += svg::text(x, y, kFainter, {"muted", "start", 12});
  return out;
}

}  // namespace

std::string to_svg(const TimelineChart& chart) {
  const Sheet sheet = sheet_of(chart);
  const double width = std::max(200, chart.width), row = std::max(8, chart.row_height);
  std::string body;
  double y = 0;
  if (!chart.title.empty()) body += svg::text(0, y += 18, chart.title, {"text", "start", 15, true}), y += 6;
  body += legend_of(sheet, y += 14);
  y += 10;
  for (const Laid& run : sheet.runs) {
    y += 22;
    body += svg::text(0, y, run.run->name, {"text", "start", 13, true});
    if (!run.run->note.empty()) {
      body += svg::text(svg::text_width(run.run->name, 13) + 18, y, run.run->note, {"muted", "start", 12});
    }
    y += 8;
    body += ranks_of(run, y, row);
    body += lanes_of(run, kRankLabel, y, row, sheet.scale(run, width - kRankLabel - kRight));
    y += row * run.ranks + kAxis;
  }
  return svg::picture(width, y + 4, body, true);
}

std::string to_html(const TimelineChart& chart) {
  const Sheet sheet = sheet_of(chart);
  const double row = std::max(8, chart.row_height);
  // There is room to scroll; the ranks' names stay.
  const double width = std::clamp(sheet.most_actions * 13, std::max(200.0, chart.width - 2 * kRankLabel), 8000.0);
  std::string out = "<figure class=\"timeline-chart\">\n", key;
  if (!chart.title.empty()) out += "<h3>" + svg::escaped(chart.title) + "</h3>\n";
  for (size_t look : sheet.looks) {
    key += "<span><i class=\"swatch\" style=\"background:" + std::string(kLooks[look].color) + "\"></i>" +
           look_text(look) + "</span>";
  }
  if (sheet.waits) {
    key += "<span>" + svg::picture(24, 8, svg::line(kWaitLine, 0, 4, 20, 4), false) + kWaits + "</span>";
  }
  if (sheet.chunks) key += "<span>" + std::string(kFainter) + "</span>";
  out += "<p class=\"key\">" + key + "</p>\n";
  for (const Laid& run : sheet.runs) {
    const double height = row * run.ranks + kAxis;
    out += "<h4>" + svg::escaped(run.run->name) + "<small>" + svg::escaped(run.run->note) +
           "</small></h4>\n<div class=\"lanes\">" + svg::picture(kRankLabel, height, ranks_of(run, 0, row), false) +
           "<div class=\"wide\">" +
           svg::picture(width, height, lanes_of(run, kRight, 0, row, sheet.scale(run, width - 3 * kRight)), false) +
           "</div></div>\n";
  }
  return out + "</figure>\n";
}

std::string to_trace(const std::vector<TimelineRun>& steps) {
  TimelineChart chart{"trace", steps};
  // Perfetto takes thread numbers as an operating system's: each is one process's alone, the first has the process's
  // own number, and 0 is nobody's.
  constexpr int kComputing = 0, kWaiting = 1, kBeside = 2, kSteps = 1;
  auto process_of = [](int rank) { return 4 * (rank + 1); };
  auto events = nlohmann::json::array();
  auto name = [&](const char* what, int process, int thread, const std::string& text) {
    events.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", process + thread}, {"args", {{"name", text}}}});
  };
  auto slice = [&](const std::string& what, int process, int thread, double from, double to, nlohmann::json facts) {
    events.push_back({{"ph", "X"},
                      {"name", what},
                      {"cat", thread == kWaiting ? "wait" : "compute"},
                      {"pid", process},
                      {"tid", process + thread},
                      {"ts", from * 1e6},
                      {"dur", (to - from) * 1e6},
                      {"args", std::move(facts)}});
  };
  std::map<int, std::set<int>> stages;  // by rank
  for (const char* what : {"process_name", "thread_name"}) name(what, kSteps, 0, "steps");
  for (const TimelineRun& run : steps) {
    const Laid checked = laid(run, chart);
    double begin = INFINITY;
    for (const TimelineAction& a : run.actions) {
      // The name in schedules: "1F0".
      const std::string what =
          std::to_string(a.stage) + a.kind + (a.microbatch < 0 ? "" : std::to_string(a.microbatch));
      nlohmann::json facts = {{"step", run.name}, {"stage", a.stage}};
      if (a.microbatch >= 0) facts["microbatch"] = a.microbatch;
      if (a.sent > 0) facts["bytes sent"] = a.sent;
      stages[a.rank].insert(a.stage);
      begin = std::min(begin, a.start);
      const bool waited = std::isfinite(a.waiting) && a.waiting < a.start && a.half != 2;
      if (waited) slice("wait for " + what, process_of(a.rank), kWaiting, a.waiting, a.start, facts);
      // Halves of a pair run at the same time: a thread each.
      slice(what, process_of(a.rank), a.half == 2 ? kBeside : kComputing, a.start, a.end, std::move(facts));
    }
    if (begin <= checked.end) slice(run.name, kSteps, 0, begin, checked.end, nlohmann::json::object());
  }
  for (const auto& [rank, of] : stages) {
    const std::string list = join(of, [](int stage) { return std::to_string(stage); });
    name("process_name", process_of(rank), 0,
         "rank " + std::to_string(rank) + ", stage" + (of.size() > 1 ? "s " : " ") + list);
    for (const auto& [thread, text] :
         {std::pair{kComputing, "computes"}, std::pair{kWaiting, "waits"}, std::pair{kBeside, "computes beside it"}}) {
      name("thread_name", process_of(rank), thread, text);
    }
  }
  return nlohmann::json{{"traceEvents", std::move(events)}}.dump(-1, ' ', true,
                                                                 nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace plumb
