// Compares all schedules for a number of ranks and microbatches, and chooses one.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "plumb/schedule/simulate.h"

namespace plumb {

// The costs of a model that is cut into a number of stages.
struct StageCosts {
  Costs costs;
  // The same if the last stage recomputes nothing, as in a table where backward_is_next() for its forwards. None: as
  // `costs`.
  std::optional<Costs> whole_last = {};
  // Memory that a stage takes whatever the schedule (parameters, the optimizer's state), in the unit of
  // costs.activation; by stage, or one entry for all; empty: none.
  std::vector<double> resident;
  double spread = 0;  // excess of measured times: sum of the medians over sum of the minima, minus 1
};
// Returns the costs that hold in this schedule: `costs` or `whole_last`.
const Costs& costs_in(const Schedule& schedule, const StageCosts& costs);
// Returns the resident memory of these stages together.
double resident_memory(const StageCosts& costs, const std::vector<int>& stages);
using CostsOf = std::function<StageCosts(int num_stages)>;

// Costs of one rank's whole share, spread evenly over its stages: forward, input, weight, full and activation are cut
// into equal parts. `costs` has one entry a list (communication is a message's, and stays).
CostsOf even_costs(const Costs& costs, int num_ranks);

struct CompareOptions {
  // The most memory a rank may take, resident and activations together, in the unit of Costs::activation.
  double memory_limit = std::numeric_limits<double>::infinity();
  std::vector<int> stages_per_rank = {2};  // tried for schedules that can have several
  std::vector<std::string> names;          // empty: all of schedule_names(), and "Searched"
};

struct ScheduleChoice {
  std::string name;
  int stages_per_rank = 1;
  std::string problem;  // why it cannot be had; what follows is empty then
  Schedule schedule;
  Simulation simulation;
  std::vector<double> memory;  // by rank: resident and Simulation::peak_memory
  bool fits = true;

  double peak() const;
};

// Shortest step first; those that do not fit, and then those that cannot be had, last. Equally quick ones: the least
// time apart (Simulation::cost), least memory, then fewest stages. So the first one is to be taken, if it `fits` and
// has no `problem`. Throws Error(InvalidArgument) for unknown names and counts below one.
std::vector<ScheduleChoice> compare_schedules(int num_ranks, int num_microbatches, const CostsOf& costs,
                                              const CompareOptions& options = {});

// Simulates the choice's schedule, and says what it takes and whether it fits.
void fill_choice(ScheduleChoice& choice, const StageCosts& costs, double memory_limit);
// Puts choices into the order of compare_schedules().
void sort_choices(std::vector<ScheduleChoice>& choices);

}  // namespace plumb
