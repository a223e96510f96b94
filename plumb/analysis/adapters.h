// Other rooms' results as charts.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/analysis/scale_chart.h"
#include "plumb/analysis/table.h"
#include "plumb/analysis/timeline_chart.h"
#include "plumb/numerics/metrics.h"
#include "plumb/pipeline/timeline.h"
#include "plumb/schedule/simulate.h"
#include "plumb/transforms/report.h"
#include "plumb/transforms/scales_graph.h"

namespace plumb {

// Nothing where blocks share scales: there every block has a range of its own.
std::optional<FormatBand> band_of(const FPFormat& format);

// With a histogram also the exponents and, with a format, what it would do to the elements.
ScaleStats scale_stats(const TensorMetrics& metrics, const FPFormat* format = nullptr);

// A row for every node that was measured, in the graph's order; parameters stand under their module by their own name.
// Formats are for the shares that are lost; they need histograms (track_scales' MetricsOptions).
ScaleVariant scale_variant(std::string name, const ScalesGraph& graph, const FPFormat* fwd = nullptr,
                           const FPFormat* bwd = nullptr);

// "Before and after": the variants against the formats of forward and backward.
ScaleChart scale_chart(std::string title, const std::vector<std::pair<std::string, const ScalesGraph*>>& graphs,
                       const FPFormat& fwd, const FPFormat& bwd);

// What a transform did, a line a node; without columns that are empty throughout.
Table table_of(const Report& report);

// What was simulated; `unit` is that of the costs. Spans that do not fit the table: Error(InvalidArgument). Only
// computation is drawn, as messages take no rank's time; an overlapped pair is two halves.
TimelineRun timeline_of(const Schedule& schedule, const Simulation& simulation, std::string name = "simulated",
                        std::string unit = "");

// What ranks recorded, in seconds. The first event starts at 0.
TimelineRun timeline_of(std::vector<TimelineEvent> events, std::string name = "measured");

}  // namespace plumb
