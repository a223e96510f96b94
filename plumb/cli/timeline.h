// A recorded step drawn beside its simulation.
#pragma once

#include <string>
#include <vector>

#include "plumb/pipeline/timeline.h"
#include "plumb/schedule/schedule.h"

namespace plumb::cli {

// Throws UsageError for a name of another kind, Error where no file can be written. "" is none.
void check_timeline(const std::string& path);

// Writes `path`: a picture (.svg), or trace events for chrome://tracing and Perfetto (.json). The simulation takes
// every stage's mean durations in the recording and messages at no cost. Returns the measured bubble.
double draw_timeline(const std::string& path, const Schedule& schedule, const std::vector<TimelineEvent>& events);

}  // namespace plumb::cli
