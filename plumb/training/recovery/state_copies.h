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
//
// Over several hosts (torchrun) all ranks of a host may be gone at once, and every other rank is started anew. A keeper
// of each host (pipeline/launch/keeper.h) holds the memory of its ranks then. What a lost host had is there of replicas
// on other hosts, and of copies that it has sent to a neighbor (neighbor_copies.h).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plumb/checkpoint/safetensors_header.h"
#include "plumb/pipeline/launch/keeper.h"
#include "plumb/pipeline/transport/process_group.h"
#include "plumb/pipeline/transport/shared_memory.h"
#include "plumb/training/job.h"
#include "plumb/training/step/optimizer.h"

namespace plumb {

// Returns parameters and buffers of the stages of a pipeline's rank, by their first names in the model.
NamedTensors held_tensors(const TrainJob& job, int rank);

// Returns the first number of a copy: 0 while it is written. A reader, after its writer is gone, sees all of it or
// none.
inline std::atomic_ref<int64_t> mark_of(char* copy) { return std::atomic_ref(*reinterpret_cast<int64_t*>(copy)); }

// A rank's state to load and to keep.
struct RankState {
  NamedTensors held;  // held_tensors()
  Optimizer& optimizer;
};

class StateCopies {
 public:
  // `keeper`: holds the memory when this process is gone; null: the other ranks do, which are all of this host.
  explicit StateCopies(std::shared_ptr<Keeper> keeper = nullptr);

  // --- a generation begins: all ranks of `world`, spares among them, call find_edge() and restore() ---
  // Returns the last edge at which every tensor of the model is held by some rank; nullopt if there is none.
  std::optional<int64_t> find_edge(const ProcessGroup& world, const TrainJob& job);
  // Returns whether any rank had copies at find_edge(), and what of the newest ones no rank had ("" if nothing).
  bool any_found() const { return any_found_; }
  const std::string& missing() const { return missing_; }
  // Restores the state of that edge into `state`, from this rank's copies and the others'; returns what `counted` was.
  // The first `training` ranks need it; null: this rank is a spare that sends what it has. Throws Error(Communication)
  // for copies that do not fit.
  nlohmann::json restore(const ProcessGroup& world, const TrainJob& job, int training, const RankState* state);
  // Has the memory of this rank, and `more`, held by the keeper or by all of `world`.
  void connect(const ProcessGroup& world, const std::vector<SharedMemory>& more = {});

  // --- while it runs ---
  // `keep_old`: copies of the generations before are still needed.
  void take(int64_t edge, const RankState& state, const nlohmann::json& counted, bool keep_old = false);
  // Gives up this rank's copy of an edge: nobody goes on from it.
  void forget(int64_t edge);
  // Returns whether each rank sees the memory of the others: all are of one host.
  bool are_shared() const { return !keeper_; }
  // Returns parameters and buffers of another rank at an edge, by their first names, over its memory; none if it has no
  // such copy, or copies are not shared.
  std::map<std::string, at::Tensor> model_of(int rank, int64_t edge) const;
  // Returns the bytes of the copy of the last take().
  at::Tensor last() const;

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

  std::shared_ptr<Keeper> keeper_;
  std::vector<SharedMemory> memory_;  // memory of this generation: two of this rank, by edge modulo 2, then the others'
  int64_t first_ = -1, last_ = -1;    // edges of this generation
  int rank_ = 0;                      // in it
  std::vector<SharedMemory> before_;  // memory of the generations before
  // How this rank's state stands in a copy.
  std::vector<std::string> names_;
  SafetensorsLayout layout_;
  // Between find_edge() and restore(): the copies of the edge, and by rank the names that it has of it.
  std::vector<Opened> opened_;
  std::vector<std::set<std::string>> held_by_;
  nlohmann::json counted_;
  bool any_found_ = false;
  std::string missing_;
};

}  // namespace plumb
