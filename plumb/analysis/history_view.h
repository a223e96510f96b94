// Recorded histories on a page: the scale picture with a step slider, one run or two side by side, for any format.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plumb/analysis/line_chart.h"
#include "plumb/analysis/scale_chart.h"
#include "plumb/analysis/table.h"
#include "plumb/numerics/format.h"
#include "plumb/recording/history.h"
#include "plumb/transforms/scales_graph.h"

namespace plumb {

struct HistoryRun {
  std::string name;  // "unit-scaled"
  History history;
};

struct HistoryView {
  std::string title;
  std::vector<HistoryRun> runs;         // one or two
  std::vector<FPFormat> formats;        // to choose from; the first is drawn for values, the second for gradients
  size_t max_bytes = size_t{16} << 20;  // of numbers in the page: more recorded steps than fit are thinned evenly
};

// Throws Error(InvalidArgument) that names a run without a recorded step.
void check_recorded(const HistoryView& view);

// One measurement as a history of one step.
History history_of(const ScalesGraph& graph, int64_t step = 1);

// The step of the run at or before `step` (0: the last) as a picture; raises Error(InvalidArgument) for a history
// without one. Tensors that were not recorded in that step are drawn as they were recorded last before.
ScaleChart scale_chart(const HistoryView& view, int64_t step = 0);

// The numbers given to Recorder::step of all runs, a chart a name.
std::vector<LineChart> scalar_charts(const HistoryView& view);

// Where rules' conditions held; no rows if nowhere.
Table event_table(const HistoryView& view);

// What each format would do to each tensor and gradient: the shares that become zero, lose digits and are too large, of
// the last recorded step at or before `step` (0: the last). Rows without a histogram are left out. Most lost first; at
// most `most` rows, 0: all.
Table format_table(const HistoryView& view, int64_t step = 0, size_t most = 0);

// For a page. A list of tensors, of which only what is in sight is drawn, so that thousands scroll and slide at once;
// it is filtered by text, sorted by a click on a column's head; a click on a tensor shows its figures, what every
// format would do to it, its histograms, and its course over the steps. Raises Error(InvalidArgument) for no or more
// than two runs, and for runs without a recorded step.
std::string to_html(const HistoryView& view);

}  // namespace plumb
