#include "plumb/training/plan/plan_page.h"

#include "plumb/analysis/adapters.h"
#include "plumb/core/table.h"

namespace plumb {
namespace {

// "model.layers.0 ... model.layers.3.mlp": the modules of a stage's first and last operators.
std::string modules_of(const GraphModule& stage) {
  std::string first, last;
  for (const Node* node : stage.graph().nodes()) {
    if (!node->is_call() || node->meta().module_path().empty()) continue;
    last = node->meta().module_path();
    if (first.empty()) first = last;
  }
  return first == last ? first : first + " ... " + last;
}

TimelineRun timeline_run(const ScheduleChoice& choice) {
  TimelineRun run = timeline_of(choice.schedule, choice.simulation, choice.name, "s");
  run.note = "bubble " + percent(choice.simulation.bubble_rate());
  return run;
}

}  // namespace

Table ranks_table(const PlannedModel& planned, const ScheduleChoice& choice) {
  Table table{{"rank", "stage", "modules", "parameters", "works", "peak memory"}, {}};
  const auto pipe = planned.pipe_of(choice);
  for (int rank = 0; pipe && rank < choice.schedule.num_ranks(); ++rank) {
    const auto at = static_cast<size_t>(rank);
    bool first = true;
    for (const int s : choice.schedule.placement.stages_of(rank)) {
      const GraphModule& stage = *pipe->stage(s);
      double bytes = 0;
      for (const Attr& attr : stage.state()) {
        if (attr.kind == AttrKind::Parameter) bytes += static_cast<double>(attr.tensor.nbytes());
      }
      table.rows.push_back({first ? std::to_string(rank) : "", std::to_string(s), modules_of(stage), bytes_text(bytes),
                            first ? seconds_text(choice.simulation.busy[at]) : "",
                            first ? bytes_text(choice.memory[at]) : ""});
      first = false;
    }
  }
  return table;
}

HtmlReport plan_page(const PlannedModel& planned, const ScheduleChoice& choice, const std::string& model) {
  const int ranks = choice.schedule.num_ranks(), microbatches = choice.schedule.num_microbatches;
  HtmlReport page("Plan of " + model, std::to_string(ranks) + (ranks == 1 ? " rank, " : " ranks, ") +
                                          std::to_string(microbatches) +
                                          (microbatches == 1 ? " microbatch" : " microbatches"));
  page.section("The plan").prose(conclusion(planned, choice) + ".");
  const ScheduleChoice* other = planned.best_named();
  if (other == nullptr || other == &choice) other = planned.find("1F1B");
  TimelineChart chart{"A step", {timeline_run(choice)}};
  if (other != nullptr && other != &choice) chart.runs.push_back(timeline_run(*other));
  page.add(chart);
  page.section("Ranks").add(ranks_table(planned, choice));
  Table table{{"schedule", "stages a rank", "step", "bubble", "memory", "remark"}, {}};
  for (const ScheduleChoice& c : planned.choices) {
    if (!c.problem.empty()) {
      table.rows.push_back({c.name, std::to_string(c.stages_per_rank), "", "", "", c.problem});
      continue;
    }
    table.rows.push_back({c.name, std::to_string(c.stages_per_rank), seconds_text(c.simulation.makespan),
                          percent(c.simulation.bubble_rate()), bytes_text(c.peak()),
                          c.fits ? "" : "more memory than the limit"});
  }
  page.section("All schedules").add(table);
  return page;
}

}  // namespace plumb
