// Other rooms' results as charts.
#pragma once

#include <string>
#include <vector>

#include "plumb/analysis/scale_chart.h"
#include "plumb/analysis/timeline_chart.h"
#include "plumb/numerics/metrics.h"
#include "plumb/pipeline/timeline.h"
#include "plumb/schedule/simulate.h"

namespace plumb {

FormatBand band_of(const FPFormat& format);

// With a histogram also the exponents and, with a format, what it would do to the elements.
ScaleStats scale_stats(const TensorMetrics& metrics, const FPFormat* format = nullptr);

// What was simulated; `unit` is that of the costs. Spans that do not fit the table: Error(InvalidArgument). Only
// computation is drawn, as messages take no rank's time; an overlapped pair is two halves.
TimelineRun timeline_of(const Schedule& schedule, const Simulation& simulation, std::string name = "simulated",
                        std::string unit = "");

// What ranks recorded, in seconds. The first event starts at 0.
TimelineRun timeline_of(std::vector<TimelineEvent> events, std::string name = "measured");

}  // namespace plumb
