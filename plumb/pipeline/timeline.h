// What a rank did when, for drawing beside the simulated time line.
#pragma once

#include <string>
#include <vector>

#include "plumb/schedule/simulate.h"

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
// What the stages took in a recorded step, for simulate_schedule: the mean of each stage's actions of a kind, and of
// the messages that a stage waited for the median time from the end of what sent it to the start of what waited, in
// seconds. Of stages in a chain: what comes past a neighbour counts as coming from it.
Costs measured_costs(const std::vector<TimelineEvent>& events, int num_stages);
// Time that ranks did not compute, as a share of ranks times makespan.
double measured_bubble(const std::vector<TimelineEvent>& events);

}  // namespace plumb
