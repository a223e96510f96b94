// The processes of a training, and this one's place among them.
#pragma once

#include <functional>

#include "plumb/pipeline/transport/process_group.h"
#include "plumb/training/data/samples.h"
#include "plumb/training/options.h"

namespace plumb {

struct TrainRanks {
  ProcessGroup everyone;  // `world`, and behind it spares
  ProcessGroup world;     // not on spares
  ReplicatedGroups groups;
  at::Device device = at::kCPU;  // where this rank's stages compute

  bool is_first() const { return world.rank() == 0; }
  bool in_first_pipeline() const { return groups.replicas.rank() == 0; }
  // This rank's number in its pipeline.
  int rank() const { return groups.pipeline.rank(); }
};

// Calls `prepare`, the work of a rank before it meets the others. Throws what it throws, and tells the others of it.
void before_meeting(const std::function<void()>& prepare);

// Meets the other ranks. `place`: this process's place in a generation of its launcher; null: its environment tells it.
// Throws UsageError if the launcher started another number of processes than the options need.
TrainRanks meet_ranks(const TrainOptions& options, const RankEnvironment* place);

// Compares the options of all ranks, which must call it, between steps. Throws Error(InvalidArgument) on every rank if
// one has another than rank 0, but for files' names and what is a rank's own (TrainField).
void check_equal_options(const ProcessGroup& world, const TrainOptions& options);

// Returns a hash of a batch's bits, sizes and dtypes that is not negative.
int64_t hash_of_batch(const Batch& batch);
// Compares the hashes of all ranks' batches for a step; all ranks must call it, between steps. Throws
// Error(InvalidArgument) on every rank if one has another batch than rank 0: its part of the step would belong to other
// rows.
void check_equal_batches(const ProcessGroup& world, int64_t hash, int64_t step);

}  // namespace plumb
