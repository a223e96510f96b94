// Generators of pipeline schedules.
//
// All take the number of ranks p and of microbatches n, each at least 1, and throw Error(InvalidArgument) otherwise.
// Tables only compute; they hold no idle entries. Unless its comment says otherwise, a table adds weight gradients up
// in microbatch order in every stage (CheckReport::weights_in_microbatch_order).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plumb/schedule/schedule.h"

namespace plumb {

// One stage a rank: all forwards, then all backwards.
Schedule gpipe_schedule(int num_ranks, int num_microbatches);

// One stage a rank: forwards until the first backward can come, then one forward, one backward (arXiv 2006.09503).
Schedule one_f_one_b_schedule(int num_ranks, int num_microbatches);

// v stages a rank, looped, microbatches in rounds of about p that go through all of a rank's stages (arXiv 2104.04473).
// Any n: the rounds, max(1, n / p) of them, differ by at most one microbatch.
Schedule interleaved_1f1b_schedule(int num_ranks, int num_microbatches, int stages_per_rank = 2);

// v stages a rank, looped, all microbatches through one stage before the next (arXiv 2211.05953). As published the
// backwards run from the last microbatch to the first, so weight gradients add up in falling order; `ascending` turns
// that round at the same cost and memory.
Schedule looped_bfs_schedule(int num_ranks, int num_microbatches, int stages_per_rank = 2, bool ascending = false);

// Interleaved 1F1B with the backward halved and weight backwards put off to where a rank would wait (arXiv 2401.10241).
Schedule interleaved_zero_bubble_schedule(int num_ranks, int num_microbatches, int stages_per_rank = 2);

// Two stages a rank in a V; no bubble by the paper's definition if F = I = W (arXiv 2401.10241, section 6).
Schedule zbv_schedule(int num_ranks, int num_microbatches);

// Two stages a rank in a V, forwards and backwards of different microbatches overlapped (DeepSeek's DualPipe cut in
// half). Made for n >= 2p; fewer microbatches get that table less the ones that are not there.
Schedule dual_pipe_v_schedule(int num_ranks, int num_microbatches);

// One stage a rank, backward halved. H1 keeps 1F1B's memory of p microbatches, with bubble (p - 1)(F + I - W); H2 takes
// 2p - 1 for (p - 1)(F + I - 2W), by the paper's definition (arXiv 2401.10241, table 2). From 2p - 1 microbatches on.
Schedule zb_h1_schedule(int num_ranks, int num_microbatches);
Schedule zb_h2_schedule(int num_ranks, int num_microbatches);

// Two stages a rank in a V, built by repeating one microbatch's block every six ticks (arXiv 2405.15362): about a half
// and a third of 1F1B's memory.
Schedule v_half_schedule(int num_ranks, int num_microbatches);
Schedule v_min_schedule(int num_ranks, int num_microbatches);

// Every stage on two ranks, s and p - 1 - s, which share its weights: the first half of the microbatches enters at rank
// 0, the second at rank p - 1 (arXiv 2412.19437). Each copy adds up its own microbatches in order; the two sums have to
// be added before the optimizer. p has to be even.
Schedule dual_pipe_schedule(int num_ranks, int num_microbatches);

// A row of the list of schedules (names.cpp). The Python class `ScheduleNAME`, the command's --schedule and the table
// in docs/pipeline.md follow from it.
struct ScheduleTraits {
  std::string name;
  std::string summary;          // one sentence; says where the schedule was published
  bool v_shape = false;         // placement
  bool bidirectional = false;   // every stage on two ranks
  int min_stages_per_rank = 1;  // the numbers of stages a rank it can be made for
  int max_stages_per_rank = 1;
  bool splits_backward = false;  // uses I and W
};

// Names as in torch, in the order of the list.
const std::vector<std::string>& schedule_names();

// Returns the names to compare unless others are asked for: all but bidirectional ones, which take every parameter
// twice and have another order of summation, and "Searched" (search.h).
std::vector<std::string> usual_schedules();

// Returns the traits of a schedule; upper and lower case are alike. Throws Error(InvalidArgument) that lists the names
// for one that is unknown.
const ScheduleTraits& schedule_traits(std::string_view name);

// Returns the table of that name. stages_per_rank 0 takes the least the schedule can be made for (two for the
// interleaved ones); a number it cannot be made for throws Error(InvalidArgument).
Schedule make_schedule(std::string_view name, int num_ranks, int num_microbatches, int stages_per_rank = 0);

}  // namespace plumb
