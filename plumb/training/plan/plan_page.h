// A plan for people: a table of the ranks, and a page.
#pragma once

#include <string>

#include "plumb/analysis/html_report.h"
#include "plumb/training/plan/plan_model.h"

namespace plumb {

// Returns a row a stage of each rank: modules, parameters, how long the rank works, the memory that it needs.
Table ranks_table(const PlannedModel& planned, const ScheduleChoice& choice);

// Returns a row a schedule, in their order; `taken` has a star. `measured`: in seconds and bytes.
Table choices_table(const std::vector<ScheduleChoice>& choices, const ScheduleChoice* taken, bool measured);

// An explanation of that table's columns, in its order.
inline constexpr const char* kChoiceColumns =
    "step: from its first action to its last, as drawn. bubble: the ranks' idle share of it, as plumb train "
    "--timeline\n"
    "measures it; least step first. apart: how far steps would be apart if no rank waited for others between them.\n"
    "paper's bubble: the idle share of that (Zero Bubble, arXiv 2401.10241).\n";

// Returns a page: the conclusion, the choice's time line beside that of the best named schedule (or of 1F1B), memory by
// rank, and the other schedules. `model`: its name.
HtmlReport plan_page(const PlannedModel& planned, const ScheduleChoice& choice, const std::string& model);

}  // namespace plumb
