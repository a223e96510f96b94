// Time lines as text. Pictures and traces are drawn by plumb/analysis/timeline_chart.h.
//
// Takes spans beside the table's rows, simulated (Simulation::spans) or recorded by a run, in any unit of time. Spans
// that do not fit the table throw Error(InvalidArgument).
#pragma once

#include <string>
#include <vector>

#include "plumb/schedule/simulate.h"

namespace plumb {

using TimeLine = std::vector<std::vector<Span>>;

// Draws a line a rank, a column a `columns`-th of the whole: F, I, W, B by what takes most of it, X for an overlapped
// pair, '.' for idle; then the rank's busy share.
std::string render_text(const Schedule& schedule, const TimeLine& spans, int columns = 100);

// Returns a line that explains the letters of render_text that are in this schedule.
std::string render_letters(const Schedule& schedule);

}  // namespace plumb
