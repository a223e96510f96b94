#include "plumb/training/timeline_file.h"

#include <algorithm>
#include <cmath>

#include "plumb/analysis/adapters.h"
#include "plumb/core/file.h"
#include "plumb/training/usage.h"

namespace plumb {

void check_timeline(const std::string& path) {
  if (path.empty()) return;
  if (!path.ends_with(".svg") && !path.ends_with(".json")) {
    throw UsageError("--timeline " + path + ": is neither .svg nor .json", "--timeline step.svg");
  }
  check_writable("--timeline", path);
}

DrawnTimeline draw_timeline(const std::string& path, const Schedule& schedule,
                            const std::vector<std::vector<TimelineEvent>>& steps, int last) {
  const MeasuredStep step = measured_step(schedule, steps.back());
  if (path.ends_with(".json")) {
    // One clock for all steps.
    double first = INFINITY;
    for (const auto& events : steps) {
      for (const TimelineEvent& e : events) first = std::min(first, e.waiting);
    }
    std::vector<TimelineRun> runs;
    int number = last - static_cast<int>(steps.size());
    for (const auto& events : steps) {
      TimelineRun run = timeline_of(events, "step " + std::to_string(++number));
      double begin = INFINITY;
      for (const TimelineEvent& e : events) begin = std::min(begin, e.waiting);
      for (TimelineAction& a : run.actions) {
        for (double* t : {&a.waiting, &a.start, &a.end}) *t += begin - first;
      }
      runs.push_back(std::move(run));
    }
    write_file_atomically(path, to_trace(runs));
  } else {
    write_file_atomically(path, to_svg(step.chart));
  }
  return {step.bubble, step.conclusion};
}

}  // namespace plumb
