// Other rooms' results as charts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plumb/analysis/scale_chart.h"
#include "plumb/analysis/timeline_chart.h"
#include "plumb/core/table.h"
#include "plumb/numerics/metrics.h"
#include "plumb/pipeline/runtime/timeline.h"
#include "plumb/schedule/simulate.h"
#include "plumb/transforms/report.h"

namespace plumb {

// Returns nullopt for formats whose blocks share scales: every block has a range of its own.
std::optional<FormatBand> band_of(const FPFormat& format);

// Returns the statistics. With a histogram also the exponents and, with a format, its effect on the elements.
ScaleStats scale_stats(const TensorMetrics& metrics, const FPFormat* format = nullptr);

// Returns a transform's report, a row for each node; without columns that are empty throughout.
Table table_of(const Report& report);

// Returns a unit scaling in numbers, with the taus of its residual adds, and why nodes were left alone.
std::string conclusion(const Report& report);

// Returns the simulated run; `unit` is that of the costs. Spans that do not fit the table: Error(InvalidArgument). Only
// computation is drawn, as messages take no rank's time; an overlapped pair is two halves.
TimelineRun timeline_of(const Schedule& schedule, const Simulation& simulation, std::string name = "simulated",
                        std::string unit = "");

// Returns the ranks' recorded events, in seconds. The first event starts at 0.
TimelineRun timeline_of(std::vector<TimelineEvent> events, std::string name = "measured");

// A recorded step beside two simulations of its table: with the stages' measured times, and with stages of the same
// mean; messages take no time in both.
struct MeasuredStep {
  TimelineChart chart;
  double bubble = 0;       // measured_bubble
  std::string conclusion;  // what the bubble is, and what of it is the table's, the stages' and the messages'
};
MeasuredStep measured_step(const Schedule& schedule, const std::vector<TimelineEvent>& events);

}  // namespace plumb
