// What a rank did when, for drawing beside the simulated time line.
#pragma once

#include <string>
#include <vector>

#include "plumb/schedule/action.h"

namespace plumb {

struct TimelineEvent {
  int rank = 0;
  Action action;
  // Seconds on the host's monotonic clock (comparable between processes of one host). From `waiting` to `start` the
  // action waited for its messages; from `start` to `end` it computed and handed its results over.
  double waiting = 0, start = 0, end = 0;
};

// A line an event: "rank action waiting start end", times in microseconds. Round-trips.
std::string to_text(const std::vector<TimelineEvent>& events);
// Raises Error(InvalidArgument) that names the line.
std::vector<TimelineEvent> parse_timeline(const std::string& text);

// Shifts the times so that the first event starts to wait at 0.
void start_at_zero(std::vector<TimelineEvent>& events);
// Time that ranks did not compute, as a share of ranks times makespan.
double measured_bubble(const std::vector<TimelineEvent>& events);

}  // namespace plumb
