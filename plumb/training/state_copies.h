// The state of a training at the last edges of its steps, in memory that outlives a rank.
//
// Edge k is the end of step k: weights, buffers, the optimizer's state and the position in the data after it. At each
// edge a rank copies its state into memory that all others of the host hold as well (pipeline/shared_memory.h), so it
// stays there when the rank is lost, and nothing is sent.
//
// A rank gives its numbers of step k + 1 to the sum of norms (share_numbers) when it has copied edge k; and none has
// that sum, and so reaches edge k + 1, before all have given theirs. Hence ranks are at edges k and k + 1 at most, for
// one k, and two edges of each are kept: whichever ranks are lost, there is an edge, the last one or the one before,
// that is there of all. At most one whole step is computed again. Only the loss of all ranks at once loses it.
//
// Steps are the same bits on any processes: copies of an edge fit together in every layout.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plumb/checkpoint/safetensors_header.h"
#include "plumb/pipeline/transport/process_group.h"
#include "plumb/pipeline/transport/shared_memory.h"
#include "plumb/training/job.h"
#include "plumb/training/optimizer.h"

namespace plumb {

// Returns parameters and buffers of the stages of a pipeline's rank, by their first names in the model.
NamedTensors held_tensors(const TrainJob& job, int rank);

// A rank's state to load and to keep.
struct RankState {
  NamedTensors held;  // held_tensors()
  Optimizer& optimizer;
};

class StateCopies {
 public:
  // --- a generation begins: all ranks of `world` call these, in this order ---
  // Returns the last edge at which every tensor of the model is held by some rank; nullopt if there is none.
  std::optional<int64_t> find_edge(const ProcessGroup& world, const TrainJob& job);
  // Restores the state of that edge into `state`, from this rank's copies and the others'; returns what `counted` was.
  // Throws Error(Communication) for copies that do not fit.
  nlohmann::json restore(const ProcessGroup& world, const TrainJob& job, const RankState& state);
  // Maps the memory of the others.
  void connect(const ProcessGroup& world);

  // --- while it runs ---
  void take(int64_t edge, const RankState& state, const nlohmann::json& counted);
  // Gives up this rank's copy of an edge: nobody goes on from it.
  void forget(int64_t edge);
  // Returns parameters and buffers of another rank at an edge, by their first names, over its memory; none if it has no
  // such copy.
  std::map<std::string, at::Tensor> model_of(int rank, int64_t edge) const;

  // Called when the generation is over: keeps the copies.
  void leave();

 private:
  // A copy taken apart: tensors over its bytes.
  struct Opened {
    int64_t edge = -1;
    std::map<std::string, at::Tensor> tensors;  // "model/NAME", "optimizer/exp_avg/NAME"
    nlohmann::json counted;
  };
  // Returns nullopt if there is no copy, or one that its rank did not complete.
  static std::optional<Opened> open(const at::Tensor& bytes);

  std::vector<SharedMemory> memory_;  // of this generation: two of this rank, by edge modulo 2, then the others'
  int64_t first_ = -1;                // edge of this generation
  int rank_ = 0;                      // in it
  std::vector<SharedMemory> before_;  // of the generations before
  // How this rank's state stands in a copy.
  std::vector<std::string> names_;
  SafetensorsLayout layout_;
  // Between find_edge() and restore(): the copies of the edge, and by rank the names that it has of it.
  std::vector<Opened> opened_;
  std::vector<std::set<std::string>> held_by_;
  nlohmann::json counted_;
};

}  // namespace plumb
