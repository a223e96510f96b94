// Finds a time table for measured costs under a memory limit.
#pragma once

#include <cstdint>
#include <limits>

#include "plumb/schedule/simulate.h"

namespace plumb {

struct SearchOptions {
  // The most activations a rank may hold, in the unit of Costs::activation (by default microbatches of a rank). 1F1B
  // takes as many as there are ranks. At least one microbatch of every rank.
  double memory_limit = std::numeric_limits<double>::infinity();
  // About how many actions may be timed in all; a table has 3 * ranks * microbatches, and at most 40,000 are tried. The
  // same numbers give the same table, whatever the machine.
  double effort = 1e8;
  std::uint64_t seed = 1;
};

struct SearchResult {
  Schedule schedule;
  Simulation simulation;  // simulation of the schedule, with the costs given
  int tried = 0;          // tables compared
};

// One stage a rank; backwards halved. The Zero Bubble paper's heuristic (arXiv 2401.10241, section 3.1): every rank
// takes what is ready, forwards first until it is warm, then input backwards before forwards, and weight backwards into
// gaps or where memory has to be freed. A grid search over all ranks finds what counts as warm, how large a gap has to
// be, and how many forwards a rank may be ahead. Then they change rank by rank as long as that helps. At last
// neighbors along the critical path swap. Minimizes the longest step of a rank (Simulation::zero_bubble_rate), then
// the makespan. Weight gradients add up in microbatch order.
//
// costs.full and costs.overlap play no part; costs.held_for_weight does: what the input backward frees can hold further
// forwards. Throws Error(InvalidArgument) for counts below one, costs that do not fit, or a limit under one microbatch.
SearchResult search_schedule(int num_ranks, int num_microbatches, const Costs& costs,
                             const SearchOptions& options = {});

}  // namespace plumb
