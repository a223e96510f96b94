// A recorded step drawn beside its simulation.
#pragma once

#include <string>
#include <vector>

#include "plumb/pipeline/timeline.h"
#include "plumb/schedule/schedule.h"

namespace plumb {

// Throws UsageError for a name of another kind, Error where no file can be written. "" is none.
void check_timeline(const std::string& path);

// Writes `path`: a picture of the last step beside its simulations (.svg; measured_step), or trace events of all steps
// for chrome://tracing and Perfetto (.json). Each step's events are those of all ranks, on the clock of the ranks; the
// last of `steps` is the step `last`.
struct DrawnTimeline {
  double bubble = 0;       // of the last step
  std::string conclusion;  // MeasuredStep::conclusion
};
DrawnTimeline draw_timeline(const std::string& path, const Schedule& schedule,
                            const std::vector<std::vector<TimelineEvent>>& steps, int last);

}  // namespace plumb
