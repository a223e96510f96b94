#include "plumb/schedule/compare.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/schedule/event_simulation.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/rank_memory.h"
#include "plumb/schedule/search.h"

namespace plumb {
namespace {

constexpr const char* kSearched = "Searched";

double at_stage(const std::vector<double>& values, int stage) {
  if (values.empty()) return 0;
  if (values.size() == 1) return values[0];
  if (stage >= 0 && static_cast<std::size_t>(stage) < values.size()) return values[static_cast<std::size_t>(stage)];
  throw Error(ErrorKind::InvalidArgument,
              str("the resident memory has ", values.size(), " entries, none of stage ", stage), "",
              "give one for all stages or one a stage");
}

// The search knows one limit for all ranks: what the rank with most memory besides activations has left.
Schedule search(int num_ranks, int num_microbatches, const StageCosts& costs, double memory_limit) {
  double most = 0;
  const Costs by_stage = costs.costs.for_stages(num_ranks, num_ranks);
  for (int stage = 0; stage < num_ranks; ++stage)
    most = std::max(most, at_stage(costs.resident, stage) + by_stage.gradient[stage] +
                              schedule_internal::most_working(by_stage, stage));
  if (most > memory_limit) {
    throw Error(ErrorKind::InvalidArgument, "the parameters alone take more memory than the limit", "",
                "a higher limit, or more ranks");
  }
  const SearchOptions options{.memory_limit = memory_limit - most, .effort = 1e7};
  return search_schedule(num_ranks, num_microbatches, costs.costs, options).schedule;
}

}  // namespace

const Costs& costs_in(const Schedule& schedule, const StageCosts& costs) {
  if (!costs.whole_last || schedule.placement.ranks.empty()) return costs.costs;
  const int last = schedule.num_stages() - 1;
  int forwards = 0, kept = 0;
  for (const auto& row : schedule_internal::without_pairs(schedule.rows)) {
    const std::vector<bool> next = backward_is_next(row);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i].kind != ActionKind::Forward || row[i].stage != last) continue;
      ++forwards;
      kept += next[i];
    }
  }
  return 2 * kept > forwards ? *costs.whole_last : costs.costs;
}

double resident_memory(const StageCosts& costs, const std::vector<int>& stages) {
  double sum = 0;
  for (const int stage : stages) sum += at_stage(costs.resident, stage);
  return sum;
}

CostsOf even_costs(const Costs& costs, int num_ranks) {
  return [costs, num_ranks](int num_stages) {
    Costs part = costs;
    const double share = static_cast<double>(num_ranks) / num_stages;
    for (auto* list : {&part.forward, &part.input, &part.weight, &part.full, &part.activation}) {
      for (double& value : *list) value *= share;
    }
    return StageCosts{part};
  };
}

double ScheduleChoice::peak() const { return memory.empty() ? 0 : *std::ranges::max_element(memory); }

void fill_choice(ScheduleChoice& choice, const StageCosts& costs, double memory_limit) {
  choice.simulation = simulate_schedule(choice.schedule, costs_in(choice.schedule, costs));
  for (int rank = 0; rank < choice.schedule.num_ranks(); ++rank) {
    choice.memory.push_back(resident_memory(costs, choice.schedule.placement.stages_of(rank)) +
                            choice.simulation.peak_memory[rank]);
  }
  choice.fits = choice.peak() <= memory_limit * (1 + 1e-9);
}

void sort_choices(std::vector<ScheduleChoice>& choices) {
  std::ranges::stable_sort(choices, [](const ScheduleChoice& a, const ScheduleChoice& b) {
    auto key = [](const ScheduleChoice& c) { return std::tuple(!c.problem.empty(), !c.fits); };
    if (key(a) != key(b)) return key(a) < key(b);
    const auto differ = [](double x, double y) { return std::abs(x - y) > 1e-9 * std::max(x, y); };
    if (differ(a.simulation.makespan, b.simulation.makespan)) return a.simulation.makespan < b.simulation.makespan;
    if (differ(a.simulation.cost(), b.simulation.cost())) return a.simulation.cost() < b.simulation.cost();
    return std::tuple(a.peak(), a.stages_per_rank) < std::tuple(b.peak(), b.stages_per_rank);
  });
}

std::vector<ScheduleChoice> compare_schedules(int num_ranks, int num_microbatches, const CostsOf& costs_of,
                                              const CompareOptions& options) {
  if (num_ranks < 1 || num_microbatches < 1) {
    throw Error(ErrorKind::InvalidArgument,
                str("schedules for ", num_ranks, " ranks and ", num_microbatches, " microbatches do not exist"));
  }
  if (!costs_of) throw Error(ErrorKind::InvalidArgument, "the costs have no function", "", "even_costs(), or your own");
  for (const int per_rank : options.stages_per_rank) {
    if (per_rank < 1) throw Error(ErrorKind::InvalidArgument, str("a rank cannot have ", per_rank, " stages"));
  }
  std::vector<std::string> names = options.names;
  if (names.empty()) {
    names = schedule_names();
    names.emplace_back(kSearched);
  }
  std::map<int, StageCosts> known;
  auto costs = [&](int stages) -> const StageCosts& {
    auto it = known.find(stages);
    return it != known.end() ? it->second : known.emplace(stages, costs_of(stages)).first->second;
  };
  std::vector<std::pair<std::string, int>> wanted;  // with the stages a rank
  for (const std::string& name : names) {
    if (name == kSearched) {
      wanted.emplace_back(name, 1);
      continue;
    }
    const ScheduleTraits& traits = schedule_traits(name);
    if (traits.max_stages_per_rank == 1) wanted.emplace_back(traits.name, 1);
    for (int per_rank : options.stages_per_rank) {
      if (per_rank >= std::max(2, traits.min_stages_per_rank) && per_rank <= traits.max_stages_per_rank)
        wanted.emplace_back(traits.name, per_rank);
    }
  }
  std::vector<ScheduleChoice> choices;
  for (const auto& [name, per_rank] : wanted) {
    ScheduleChoice choice{name, per_rank};
    try {
      const StageCosts& stage_costs = costs(num_ranks * per_rank);
      choice.schedule = name == kSearched ? search(num_ranks, num_microbatches, stage_costs, options.memory_limit)
                                          : make_schedule(name, num_ranks, num_microbatches, per_rank);
      fill_choice(choice, stage_costs, options.memory_limit);
    } catch (const Error& e) {
      choice = {name, per_rank, e.message()};
      choice.fits = false;
    }
    choices.push_back(std::move(choice));
  }
  sort_choices(choices);
  return choices;
}

}  // namespace plumb
