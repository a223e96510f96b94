// The time lines of all ranks: measured runs next to simulated ones.
#pragma once

#include <cmath>
#include <string>
#include <vector>

namespace plumb {

struct TimelineAction {
  int rank = 0;
  // "F", "I", "W", "B" have colours of their own; anything else is grey.
  std::string kind;
  int stage = 0, microbatch = -1;  // -1: none
  double start = 0, end = 0;
  double waiting = NAN;  // the action waited for its messages from here on; NaN: not known
  // Of an overlapped pair each half has its own action at the same time: 0 full height, 1 upper half, 2 lower half.
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

// A picture that stands alone. Raises Error(InvalidArgument) that names the run and the action for times that are not
// finite or end before they start, negative ranks, and more than 200,000 actions.
std::string to_svg(const TimelineChart& chart);

// The same for a page; scrolls sideways where actions would be too narrow to see.
std::string to_html(const TimelineChart& chart);

// For chrome://tracing and Perfetto: a process a rank, named with its stages, a thread for what it computes and one for
// what it waits for; each run is a step, marked with its name on a process of its own. Times are those of the runs, in
// seconds. Raises the errors of to_svg.
std::string to_trace(const std::vector<TimelineRun>& steps);

}  // namespace plumb
