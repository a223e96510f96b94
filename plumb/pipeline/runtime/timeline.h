// A rank's actions with their times, for drawing beside the simulated time line.
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
  std::int64_t sent = 0;  // bytes that it handed to other ranks
};

// Writes a line an event: "rank action waiting start end sent", times in microseconds; the last may be left out.
// Round-trips.
std::string to_text(const std::vector<TimelineEvent>& events);
// Throws Error(InvalidArgument) that names the line.
std::vector<TimelineEvent> parse_timeline(const std::string& text);

// Shifts the times so that the first event starts to wait at 0.
void start_at_zero(std::vector<TimelineEvent>& events);
// Returns costs of a recorded step in seconds, for simulate_schedule. An action costs the mean over the stage's actions
// of its kind. A message that a stage waited for costs the median time from the end of the sending action to the start
// of the waiting one. Stages form a chain: a message from beyond a neighbor counts as the neighbor's.
Costs measured_costs(const std::vector<TimelineEvent>& events, int num_stages);
// Returns the share of ranks times makespan in which ranks did not compute.
double measured_bubble(const std::vector<TimelineEvent>& events);

// Returns seconds on the clock of time lines.
double seconds_now();

}  // namespace plumb
