// A plan for people: a table of the ranks, and a page.
#pragma once

#include <string>

#include "plumb/analysis/html_report.h"
#include "plumb/training/plan/plan_model.h"

namespace plumb {

// Returns a row a stage of each rank: modules, parameters, how long the rank works, the memory that it needs.
Table ranks_table(const PlannedModel& planned, const ScheduleChoice& choice);

// Returns a page: the conclusion, the choice's time line beside that of the best named schedule (or of 1F1B), memory by
// rank, and the other schedules. `model`: its name.
HtmlReport plan_page(const PlannedModel& planned, const ScheduleChoice& choice, const std::string& model);

}  // namespace plumb
