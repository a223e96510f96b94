// The state of a training at the last edges of its steps, in memory: every rank's own, and a copy of a neighbour's.
//
// Edge k is the end of step k: weights, buffers, the optimiser's state and the position in the data after it. At each
// edge a rank copies its state, and in the next step it sends the copy to the rank after it (pipeline/copy_ring.h).
// With replicas nothing is sent: a rank's own copy is one of its replicas' state, too.
//
// A rank gives its numbers of step k + 1 to the sum of norms (share_numbers) only after settle(), when it holds its
// neighbour's copy of edge k; and none has that sum, and so reaches edge k + 1, before all have given theirs. Hence:
//  - ranks are at edges k and k + 1 at most, for one k;
//  - when one is at k + 1, all neighbours' copies of edge k are where they belong; when none is, those of k - 1 are.
// So two edges of each are kept, and whichever rank is lost, there is an edge, the last one or the one before, at which
// every tensor is held by someone. At most one whole step is computed again. Two ranks beside each other that are lost
// at once take both copies of a state with them.
//
// Steps are the same bits whoever computes them: copies of an edge fit together whatever layout they were taken in.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/pipeline/copy_ring.h"
#include "plumb/training/job.h"
#include "plumb/training/optimizer.h"

namespace plumb {

// Parameters and buffers of the stages of a pipeline's rank, by their first names in the model.
NamedTensors held_tensors(const TrainJob& job, int rank);

// What a rank has to load and to keep.
struct RankState {
  NamedTensors held;                           // held_tensors()
  const std::vector<NamedTensor>* parameters;  // those of `optimizer`
  Optimizer* optimizer = nullptr;
};

class StateCopies {
 public:
  // --- a generation begins: all ranks of `world` call these, in this order ---
  // The last edge at which every tensor of the model is held by someone; nothing if there is none.
  std::optional<int64_t> find_edge(const ProcessGroup& world, const TrainJob& job);
  // The state of that edge into `state`, from this rank's copies and the others'; answers what `counted` was. Raises
  // Error(Communication) for copies that do not fit.
  nlohmann::json restore(const ProcessGroup& world, const TrainJob& job, const RankState& state);
  // Connects to the neighbours.
  void connect(const ProcessGroup& world, int replicas);

  // --- while it runs ---
  void take(int64_t edge, const RankState& state, const nlohmann::json& counted);
  // Before this rank gives its numbers of a step: waits until the neighbour's copy is here.
  void settle();

  // The generation is over: closes the connections and keeps the copies.
  void leave();

 private:
  struct Copy {
    int64_t edge = -1;
    at::Tensor bytes;
  };
  // A copy taken apart: tensors over its bytes.
  struct Opened {
    int64_t edge = -1;
    std::map<std::string, at::Tensor> tensors;  // "model/NAME", "optimizer/exp_avg/NAME"
    nlohmann::json counted;
    std::set<std::string> names() const;  // of the model's tensors
  };
  static Opened open(const Copy& copy);
  void lay_out(const NamedTensors& tensors);

  std::unique_ptr<CopyRing> ring_;
  Copy own_[2], theirs_[2];         // by edge modulo 2
  int64_t first_ = -1, last_ = -1;  // edges of this generation
  bool settled_ = true;
  std::vector<Opened> before_;  // of the generations before
  // How this rank's state stands in a copy.
  std::vector<std::string> names_;
  std::vector<int64_t> offsets_;
  std::string header_;
  int64_t data_bytes_ = 0;
  // Between find_edge() and restore(): by rank the names that it has of the edge.
  std::vector<std::set<std::string>> held_by_;
  nlohmann::json counted_;
};

}  // namespace plumb
