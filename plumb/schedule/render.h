// Time lines drawn: text, SVG, and the trace format of Chrome and Perfetto.
//
// All take spans beside the table's rows, simulated (Simulation::spans) or recorded by a run, in any unit of time.
// Spans that do not fit the table raise Error(InvalidArgument).
#pragma once

#include <string>
#include <vector>

#include "plumb/schedule/simulate.h"

namespace plumb {

using TimeLine = std::vector<std::vector<Span>>;

// A line a rank, a column a `columns`-th of the whole: F, I, W, B by what takes most of it, X for an overlapped pair,
// '.' for idle; then the rank's busy share.
std::string render_text(const Schedule& schedule, const TimeLine& spans, int columns = 100);

struct SvgOptions {
  int width = 1200;  // pixels, without the ranks' names
  int row_height = 24;
  std::string title;  // default: the schedule's name
};

// A picture with a row a rank; every action has its text as a tool tip, and as a label where it is wide enough. Up to
// 200,000 actions, else Error(InvalidArgument).
std::string render_svg(const Schedule& schedule, const TimeLine& spans, const SvgOptions& options = {});

// Trace events: a process a table, a thread a rank. `microseconds` is the length of the spans' unit.
std::string render_chrome_trace(const Schedule& schedule, const TimeLine& spans, double microseconds = 1);

}  // namespace plumb
