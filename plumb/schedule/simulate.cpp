#include "plumb/schedule/simulate.h"

#include <algorithm>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/event_simulation.h"
#include "plumb/schedule/rank_memory.h"

namespace plumb {
namespace {

constexpr double kMostCost = 1e100;  // sums of as many as memory holds are finite, and so are their squares

std::vector<double> spread(const std::vector<double>& values, int num_stages, const char* what) {
  std::size_t count = static_cast<std::size_t>(num_stages);
  if (values.size() != 1 && values.size() != count) {
    throw Error(ErrorKind::InvalidArgument,
                str("the ", what, " costs have ", values.size(), " entries for ", num_stages, " stages"), "",
                "give one for all stages or one a stage");
  }
  for (double value : values) {
    if (!(value >= 0 && value <= kMostCost)) {
      throw Error(ErrorKind::InvalidArgument, str("a ", what, " cost is not between 0 and 1e100"));
    }
  }
  return values.size() == count ? values : std::vector<double>(count, values.front());
}

void check_share(double share, const char* what) {
  if (!(share >= 0 && share <= 1)) {
    throw Error(ErrorKind::InvalidArgument, str(what, " is ", share, ", not between 0 and 1"));
  }
}

double max_of(const std::vector<double>& values) { return values.empty() ? 0 : *std::ranges::max_element(values); }

double mean_of(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

namespace schedule_internal {

bool has_backward(const Schedule& schedule) {
  return std::ranges::any_of(schedule.rows, [](const auto& row) {
    return std::ranges::any_of(
        row, [](const Action& action) { return action.is_compute() && action.kind != ActionKind::Forward; });
  });
}

std::vector<std::vector<Action>> without_pairs(const std::vector<std::vector<Action>>& rows) {
  std::vector<std::vector<Action>> parts;
  for (const auto& row : rows) {
    parts.emplace_back();
    for (const Action& action : row) {
      for (const Action& part : {action.first_part(), action.second_part()}) {
        if (!part.is_idle()) parts.back().push_back(part);
      }
    }
  }
  return parts;
}

}  // namespace schedule_internal

Costs Costs::for_stages(int num_stages, int num_ranks) const {
  if (num_stages < 0) throw Error(ErrorKind::InvalidArgument, str("there are no costs of ", num_stages, " stages"));
  Costs result = *this;
  result.forward = spread(forward, num_stages, "forward");
  result.input = spread(input, num_stages, "input backward");
  result.weight = spread(weight, num_stages, "weight backward");
  result.communication = spread(communication, num_stages, "communication");
  result.copies = spread(copies, num_stages, "copies");
  if (full.empty()) {
    result.full.resize(result.input.size());
    std::transform(result.input.begin(), result.input.end(), result.weight.begin(), result.full.begin(), std::plus<>());
  } else {
    result.full = spread(full, num_stages, "full backward");
  }
  double share = static_cast<double>(num_ranks) / std::max(num_stages, 1);
  result.activation = spread(activation.empty() ? std::vector<double>{share} : activation, num_stages, "activation");
  check_share(overlap, "the overlap of forward and backward");
  result.held_for_weight = spread(held_for_weight, num_stages, "held for weight");
  result.gradient = spread(gradient.empty() ? std::vector<double>{0} : gradient, num_stages, "gradient");
  result.values = spread(values.empty() ? std::vector<double>{0} : values, num_stages, "values");
  result.buffers = spread(buffers.empty() ? std::vector<double>{0} : buffers, num_stages, "buffers");
  for (const auto list : schedule_internal::kWorking)
    result.working.*list = spread(result.working.*list, num_stages, "working memory");
  return result;
}

double Simulation::bubble_rate() const { return makespan > 0 ? 1 - mean_of(busy) / makespan : 0; }

double Simulation::cost() const {
  double longest = 0;
  for (std::size_t rank = 0; rank < first.size(); ++rank) longest = std::max(longest, last[rank] - first[rank]);
  return longest;
}

double Simulation::zero_bubble_rate() const {
  const double cost = this->cost();
  return cost > 0 ? 1 - mean_of(busy) / cost : 0;
}

double Simulation::bubble_time() const { return makespan - max_of(busy); }

double Simulation::zero_bubble_time() const { return cost() - max_of(busy); }

double Simulation::max_peak_memory() const { return max_of(peak_memory); }

Simulation simulate_schedule(const Schedule& schedule, const Costs& given, const StageEdges& edges) {
  CheckOptions check;
  check.forward_only = !schedule_internal::has_backward(schedule);
  check.blocking_receives = false;
  require_runnable(schedule, edges, check);
  Costs costs = given.for_stages(schedule.num_stages(), schedule.num_ranks());
  schedule_internal::StageGraph graph(edges, schedule.num_stages());
  const schedule_internal::RankCosts placed(costs, schedule.placement.ranks);
  schedule_internal::EventSimulation events(schedule, graph, placed, {.pairs_at_once = false});
  Simulation result;
  result.spans = std::move(events.spans);
  result.busy = std::move(events.busy);
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    double first = 0, last = 0;
    bool seen = false;
    for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      if (!schedule.rows[rank][i].is_compute()) continue;
      const Span& span = result.spans[rank][i];
      if (!seen) first = span.start;
      seen = true;
      last = span.end;
    }
    result.first.push_back(first);
    result.last.push_back(last);
    result.makespan = std::max(result.makespan, last);
    result.peak_memory.push_back(schedule_internal::peak_memory(schedule, static_cast<int>(rank), placed).first);
  }
  return result;
}

}  // namespace plumb
