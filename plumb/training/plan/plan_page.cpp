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

Table choices_table(const std::vector<ScheduleChoice>& choices, const ScheduleChoice* taken, bool measured) {
  Table table{{"", "schedule", "stages a rank", "step", "bubble", "apart", "paper's bubble", "memory", "remark"}, {}};
  const auto time = [&](double value) { return measured ? seconds_text(value) : short_number(value); };
  for (const ScheduleChoice& c : choices) {
    std::vector<std::string> row{&c == taken ? "*" : "", c.name, std::to_string(c.stages_per_rank)};
    if (!c.problem.empty()) {
      row.insert(row.end(), {"", "", "", "", "", c.problem});
    } else {
      row.insert(row.end(),
                 {time(c.simulation.makespan), percent(c.simulation.bubble_rate()), time(c.simulation.cost()),
                  percent(c.simulation.zero_bubble_rate()), measured ? bytes_text(c.peak()) : short_number(c.peak()),
                  c.fits ? "" : "more memory than the limit"});
    }
    table.rows.push_back(std::move(row));
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
  page.section("All schedules").add(choices_table(planned.choices, &choice, true)).prose(kChoiceColumns);
  return page;
}

}  // namespace plumb
