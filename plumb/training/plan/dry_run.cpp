#include "plumb/training/plan/dry_run.h"

#include "plumb/core/join.h"
#include "plumb/core/table.h"
#include "plumb/pipeline/runtime/stage_costs.h"
#include "plumb/training/step/loss.h"

namespace plumb {

TrainNeeds measure_needs(const TrainOptions& o, const TrainJob& job) {
  StageCostOptions measuring;
  // Parameters and gradients, and what the optimizer keeps of each.
  measuring.bytes_per_parameter_byte = o.optimizer != "sgd" ? 4 : o.momentum > 0 ? 3 : 2;
  measuring.busy_ranks = o.processes();
  measuring.loss = example_loss(o.loss, job.module());
  for (int s = 0; s < job.pipe->num_stages(); ++s)
    measuring.recompute.push_back(
        parse_recompute(job.plan ? job.plan->recompute[static_cast<size_t>(s)] : o.recompute));
  const StageCosts costs = measure_stages(*job.pipe, example_inputs(job.module()), measuring);
  ScheduleChoice choice{.schedule = job.schedule};
  fill_choice(choice, costs, std::numeric_limits<double>::infinity());
  TrainNeeds needs{job.schedule.name,
                   choice.simulation.makespan * static_cast<double>(o.accumulate),
                   choice.simulation.bubble_rate(),
                   job.rows,
                   {}};
  for (int rank = 0; rank < job.schedule.num_ranks(); ++rank) {
    RankNeeds own;
    own.stages = job.schedule.placement.stages_of(rank);
    for (const int stage : own.stages) {
      own.resident += costs.costs.gradient.at(static_cast<size_t>(stage));
      for (const Attr& attr : job.pipe->stage(stage)->state()) {
        if (attr.kind == AttrKind::Parameter) own.parameters += attr.tensor.numel();
      }
    }
    own.peak = choice.memory[static_cast<size_t>(rank)];
    own.resident += resident_memory(costs, own.stages);
    needs.ranks.push_back(std::move(own));
  }
  return needs;
}

std::string to_text(const TrainNeeds& needs, const TrainOptions& o) {
  Table table{{"rank", "stages", "parameters", "weights and optimizer", "peak memory"}, {}};
  for (size_t rank = 0; rank < needs.ranks.size(); ++rank) {
    const RankNeeds& own = needs.ranks[rank];
    table.rows.push_back({std::to_string(rank), join(own.stages, [](int s) { return std::to_string(s); }),
                          std::to_string(own.parameters), bytes_text(own.resident), bytes_text(own.peak)});
  }
  const std::string pipelines = o.replicas == 1 ? "" : c10::str(", in each of ", o.replicas, " pipelines");
  return c10::str("A step of ", needs.rows, " rows takes about ", short_number(needs.seconds), " s by ", needs.schedule,
                  " (bubble ", percent(needs.bubble), "), ", o.steps, " steps ",
                  short_number(needs.seconds * static_cast<double>(o.steps)), " s", pipelines, ".\n\n", to_text(table));
}

}  // namespace plumb
