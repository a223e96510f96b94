#include "plumb/cli/timeline.h"

#include <cstdio>

#include "plumb/analysis/adapters.h"
#include "plumb/cli/common.h"
#include "plumb/schedule/render.h"

namespace plumb::cli {
namespace {

std::string percent(const char* what, double share) {
  char text[64];
  std::snprintf(text, sizeof text, "%s %.1f %%", what, 100 * share);
  return text;
}

}  // namespace

void check_timeline(const std::string& path) {
  if (path.empty()) return;
  if (!path.ends_with(".svg") && !path.ends_with(".json")) {
    throw UsageError("--timeline " + path + ": is neither .svg nor .json", "--timeline step.svg");
  }
  check_writable("--timeline", path);
}

double draw_timeline(const std::string& path, const Schedule& schedule, const std::vector<TimelineEvent>& events) {
  const double bubble = measured_bubble(events);
  if (path.ends_with(".json")) {
    // As a table of its own: what ran, in the order in which it ran.
    Schedule ran = schedule;
    for (auto& row : ran.rows) row.clear();
    TimeLine spans(ran.rows.size());
    for (const auto& e : events) {
      ran.rows.at(static_cast<size_t>(e.rank)).push_back(e.action);
      spans.at(static_cast<size_t>(e.rank)).push_back({e.start, e.end});
    }
    write_text(render_chrome_trace(ran, spans, 1e6), path);
    return bubble;
  }
  const Simulation simulation = simulate_schedule(schedule, measured_costs(events, schedule.num_stages()));
  TimelineChart chart;
  chart.title = schedule.name;
  chart.runs = {timeline_of(events), timeline_of(schedule, simulation, "simulated", "s")};
  chart.runs[0].note = percent("bubble", bubble);
  chart.runs[1].note = percent("bubble", simulation.bubble_rate());
  write_text(to_svg(chart), path);
  return bubble;
}

}  // namespace plumb::cli
