// The time lines of all ranks: measured runs next to simulated ones.
#pragma once

#include <cmath>
#include <string>
#include <vector>

namespace plumb {

struct TimelineAction {
  int rank = 0;
  // "F", "I", "W", "B" have colors of their own; anything else is gray.
  std::string kind;
  int stage = 0, microbatch = -1;  // -1: none
  double start = 0, end = 0;
  double waiting = NAN;  // the action waited for its messages from here on; NaN: not known
  // part of the bar's height: 0 all, 1 upper half, 2 lower half (an overlapped pair is two actions at once)
  int half = 0;
  int64_t sent = 0;  // bytes that it handed to other ranks
};

struct TimelineRun {
  std::string name;  // "measured", "simulated"
  std::string unit;  // "s" is shown as ms or µs where that reads better; "" has no unit
  std::vector<TimelineAction> actions;
  int num_ranks = 0;  // at least the actions'; ranks without actions get a row
  std::string note;   // shown beside the name: "bubble 12%"
};

struct TimelineChart {
  std::string title;
  std::vector<TimelineRun> runs;  // below each other; runs of the same unit share their scale
  int width = 1130;               // the longest run, with the ranks' names
  int row_height = 26;
};

// Draws a picture that stands alone. Throws Error(InvalidArgument) that names the run and the action for times that are
// not finite or end before they start, negative ranks, and more than 200,000 actions.
std::string to_svg(const TimelineChart& chart);

// As to_svg(), for a page; scrolls sideways if actions would be too narrow to see.
std::string to_html(const TimelineChart& chart);

// Returns a trace for chrome://tracing and Perfetto. Each rank is a process, named with its stages, with one thread for
// its computing and one for its waiting. Each run is a step, marked with its name on a process of its own. Times are
// those of the runs, in seconds. Throws the errors of to_svg.
std::string to_trace(const std::vector<TimelineRun>& steps);

}  // namespace plumb
