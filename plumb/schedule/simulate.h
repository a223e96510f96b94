// The time line, bubble and memory of a time table, from the costs of its stages.
#pragma once

#include <vector>

#include "plumb/schedule/schedule.h"

namespace plumb {

// The costs of stages, in any one unit of time. Every list is by stage, or has one entry that holds for all stages.
struct Costs {
  std::vector<double> forward = {1};
  std::vector<double> input = {1};   // backward with respect to the input
  std::vector<double> weight = {1};  // backward with respect to the weights
  std::vector<double> full = {};     // full backward; empty: input + weight
  // A message that leaves the stage for another rank costs this, and so does the gradient that comes back for it.
  // Messages travel while both ranks compute; between stages of one rank they cost nothing.
  std::vector<double> communication = {0};
  // Time that each end of such a message takes to copy it, besides its action; by the earlier stage.
  std::vector<double> copies = {0};
  // OVERLAP_F_B: so much of the shorter of the two is hidden behind the other if the backward's input comes in time; 0:
  // one after the other.
  double overlap = 0;
  // Memory that one microbatch's saved activations take, by stage, in any unit; empty: 1 / (stages a rank), so that
  // memory reads in microbatches of a whole rank.
  std::vector<double> activation = {};
  // The share of it that is held from the input backward until the weight backward, by stage; above 1 where gradients
  // wait for the weight half, too.
  std::vector<double> held_for_weight = {1};
  // Memory of a stage's gradients, there from its first weight or full backward on; empty: none.
  std::vector<double> gradient = {};
  // Memory of the values that leave a stage, and of the gradients that come back for them. It is held from one stage's
  // action to the next stage's where both are on one rank, and where a message comes before its turn. Empty: none.
  std::vector<double> values = {};
  // Memory of a buffer that is posted for such a message before it comes, two for each peer; the sender keeps a copy
  // until the peer's next message. 0, or empty: messages are taken as they come.
  std::vector<double> buffers = {};
  // Memory that actions take while they run, besides what there is before or after them.
  struct Working {
    std::vector<double> forward = {0}, input = {0}, weight = {0}, full = {0};
    std::vector<double> first_weight = {0}, first_full = {0};  // where they bring the gradients
  } working = {};

  // Returns these costs with one entry a stage. Throws Error(InvalidArgument) for a list of another length, or a value
  // that is negative or not finite.
  Costs for_stages(int num_stages, int num_ranks) const;
};

struct Span {
  double start = 0, end = 0;
  bool operator==(const Span&) const = default;
};

struct Simulation {
  // Beside the table's rows: when every entry runs (messages and idle entries: no length).
  std::vector<std::vector<Span>> spans;
  double makespan = 0;              // from 0 to the end of the last action
  std::vector<double> busy;         // by rank: time spent computing
  std::vector<double> first, last;  // by rank: start of its first and end of its last computation
  // By rank, in the unit of Costs::activation: activations, gradients, values and messages that wait, and what the
  // action works in.
  std::vector<double> peak_memory;

  // Returns the ranks' idle share of the makespan: 1 - mean(busy) / makespan.
  double bubble_rate() const;
  // The Zero Bubble paper's (arXiv 2401.10241, section 4): every rank may start its step when its first work comes and
  // end with its last, as the optimizer's step needs no common instant. So steps are apart by the longest that a rank
  // works at one: the largest last - first.
  double cost() const;
  // 1 - mean(busy) / cost().
  double zero_bubble_rate() const;
  // Those in time: makespan - max(busy), and cost() - max(busy).
  double bubble_time() const;
  double zero_bubble_time() const;
  double max_peak_memory() const;
};

// Throws Error(Schedule) for a table that cannot run to its end (see check.h), Error(InvalidArgument) for bad costs.
Simulation simulate_schedule(const Schedule& schedule, const Costs& costs = {}, const StageEdges& edges = {});

}  // namespace plumb
