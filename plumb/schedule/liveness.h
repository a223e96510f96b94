// How long a rank of a time table keeps the activations of each stage and microbatch, and which of them could take the
// same memory one after the other.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "plumb/schedule/schedule.h"

namespace plumb {

struct PipelineActivationLiveness {
  struct Life {
    int forward = 0, release = 0;  // positions in the rank's row
    int slot = 0;
  };
  std::map<std::pair<int, int>, Life> lives;  // by stage and microbatch, for those that the rank runs
  int num_slots = 0;
};

// Activations live from their forward to their full backward, or to the half for the weights, both included. A slot is
// free for the next one after that; the lowest free slot is taken. `whole_microbatches`: the stages share a slot for
// each microbatch, from its first forward to its last release among them. Throws Error(InvalidArgument) for a rank that
// is not there, for no stages and for one given twice; Error(Schedule) for a stage that the rank does not run, and for
// a microbatch without a forward before its one release.
PipelineActivationLiveness analyze_pipeline_activation_liveness(const Schedule& schedule, int rank,
                                                                const std::vector<int>& stages,
                                                                bool whole_microbatches);

}  // namespace plumb
