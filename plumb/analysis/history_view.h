// Recorded histories on a page: the scale picture with a step slider, several runs side by side, against formats.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plumb/analysis/line_chart.h"
#include "plumb/analysis/scale_chart.h"
#include "plumb/core/table.h"
#include "plumb/numerics/format.h"
#include "plumb/recording/history.h"
#include "plumb/transforms/track/scales_graph.h"

namespace plumb {

struct HistoryRun {
  std::string name;  // "unit-scaled"
  History history;
};

struct HistoryView {
  std::string title;
  std::vector<HistoryRun> runs;         // one to eight
  std::vector<FPFormat> formats;        // by role: of values, then of gradients; one is of both, none is asked for
  std::vector<FPFormat> asked = {};     // further ones, asked of values and gradients alike
  size_t max_bytes = size_t{16} << 20;  // byte limit of the page's numbers: more steps than fit are thinned evenly

  // Returns the format of that role; null if there is none.
  const FPFormat* role(bool backward) const;
};

// Throws Error(InvalidState) that names a run without a recorded step.
void check_recorded(const HistoryView& view);

// Returns one measurement as a history of one step.
History history_of(const ScalesGraph& graph, int64_t step = 1);

// Draws the step of the run at or before `step` (0: the last); throws Error(InvalidState) for a history without one.
// Tensors that were not recorded in that step are drawn as they were recorded last before.
ScaleChart scale_chart(const HistoryView& view, int64_t step = 0);

// Returns the numbers given to Recorder::step of all runs, a chart a name.
std::vector<LineChart> scalar_charts(const HistoryView& view);

// Returns the steps at which rules' conditions held; no rows if there are none.
Table event_table(const HistoryView& view);

// Returns the effect of its role's format and of the formats asked for on each tensor and gradient: the shares that
// become zero, lose digits and are too large, of the last recorded step at or before `step` (0: the last). Rows without
// a histogram are left out. Most lost by the role's format first; at most `most` rows, 0: all.
Table format_table(const HistoryView& view, int64_t step = 0, size_t most = 0);

// Returns the statistics that were recorded of each tensor and gradient, at the same step as format_table(). What no
// row has is no column, what one row lacks is empty.
Table statistics_table(const HistoryView& view, int64_t step = 0);

// Returns format_table() by layers: a row a layer (layer_of), the one of the worst tensor first, and below it its
// tensors that lose anything, at most `most` of each layer.
Table layer_table(const HistoryView& view, int64_t step = 0, size_t most = 20);

// Returns a tensor's name below its module.
std::string local_name(const HistoryTensor& tensor);

// Returns a module's path up to its first number: "layers.0" for "layers.0.attn.q"; all of it if there is none.
std::string layer_of(const std::string& module);

// Returns how many tensors lose 1 % or more in each run, the worst one, and the same at the first recorded step. A
// tensor counts once, by its values or its gradient, each in its role's format.
std::string conclusion(const HistoryView& view, int64_t step = 0);

// Returns the view for a page: a list of tensors, of which only the visible part is drawn, so that thousands scroll and
// slide at once. It is filtered by text and sorted by a click on a column's head. A click on a tensor shows its
// figures, the effect of every format on it, its histograms, and its course over the steps. Layers have their courses
// over the steps beside each other, with a curve a run. Throws Error(InvalidArgument) for no or more than eight runs,
// and for runs without a recorded step.
std::string to_html(const HistoryView& view, RunColors& colors);

}  // namespace plumb
