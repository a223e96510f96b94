// The form of a table in which a column is a tick.
#include <cmath>

#include "plumb/schedule/check.h"
#include "plumb/schedule/event_simulation.h"

namespace plumb {

Schedule with_idle_ticks(const Schedule& given) {
  Schedule schedule = without_idle(given);
  require_runnable(schedule);
  for (const auto& row : schedule.rows) {
    for (const Action& action : row) {
      if (action.kind == ActionKind::Overlap) return schedule;
    }
  }
  Costs costs = Costs{.full = {1}, .overlap = 1}.for_stages(schedule.num_stages(), schedule.num_ranks());
  schedule_internal::StageGraph graph({}, schedule.num_stages());
  schedule_internal::EventSimulation events(schedule, graph, costs);
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    std::vector<Action> row;
    for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const auto tick = static_cast<std::size_t>(std::lround(events.spans[rank][i].start));
      if (row.size() < tick) row.resize(tick, Action::idle());
      row.push_back(schedule.rows[rank][i]);
    }
    schedule.rows[rank] = std::move(row);
  }
  return schedule;
}

}  // namespace plumb
