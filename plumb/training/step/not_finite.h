// The end of a training whose loss or gradients are not finite.
#pragma once

#include "plumb/training/reports/run_reports.h"

namespace plumb {

// Ends a training at a step whose loss or gradients are not finite: finds the first such value, keeps the step where
// --dump asks for it, and throws Error(Numerics) that names the value. All ranks call it.
[[noreturn]] void stop_at_not_finite(const TrainOptions& options, const TrainJob& job, const TrainRanks& ranks,
                                     int64_t step, const TrainStep::Numbers& numbers, const Parts& parts,
                                     const RunReports& reports);

}  // namespace plumb
