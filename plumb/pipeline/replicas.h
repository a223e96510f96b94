// Data parallel beside pipeline: ranks of several pipelines that hold the same stages sum their gradients.
//
// A stage's gradients are on their way as soon as its last weight gradient of the step is there, while the rank drains
// its other stages and earlier ranks their own. Every parameter belongs to one of the replicas: it gets the others'
// gradients, adds them in the order of replicas (replica 0's first), and hands the sum to all. So the sum does not
// depend on timing or on the number of messages, and all replicas have the same bits: those of one process that
// accumulates each replica's microbatches in order and then adds these sums in order.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "plumb/pipeline/gradients.h"
#include "plumb/pipeline/run_plan.h"
#include "plumb/pipeline/transport.h"

namespace plumb {

class ReplicaSums {
 public:
  // Blocks until all replicas have come. `description`: of layout and schedule, the same on all. `parameters`: of this
  // rank's stages; `shared`: those (by index) that are summed over copies first. `plan`: of this rank, the same on all
  // replicas. Raises Error(Communication) if replicas differ in any of this, or in their parameters' values.
  ReplicaSums(ProcessGroup group, const std::string& description,
              const std::map<int, std::vector<NamedTensor>>& parameters, std::map<int, std::set<int>> shared,
              const RunPlan& plan);

  int rank() const { return transport_.group().rank(); }
  int size() const { return transport_.group().size(); }

  // `rows`: of this replica's batch; with `weighted` a replica's gradients count by its rows.
  void begin_step(double rows, bool weighted);
  // The stage's own share of the step is there.
  void stage_done(int stage, const GradientKeeper& gradients);
  // Waits for everything and puts the sums into the keepers. `loss`: this replica's mean, may be undefined.
  void finish(const std::map<int, GradientKeeper*>& gradients, const at::Tensor& loss);
  // The mean over all replicas by rows; undefined if one has none.
  const at::Tensor& loss() const { return loss_; }

  void tell_failure(const std::string& reason) noexcept { transport_.tell_failure(reason); }

 private:
  // Parameters that travel together: a stage's, or those summed over copies.
  struct Part {
    int stage;  // -1: summed over copies
    struct Member {
      int stage, index, owner;
    };
    std::vector<Member> members;
  };
  // Places in the plan by replica.
  struct Way {
    std::vector<int> sends, receives;
  };

  Way add_messages(int from, int phase);
  void send_part(size_t part, const std::function<at::Tensor(const Part::Member&)>& gradient);
  at::Tensor add_up(const std::vector<at::Tensor>& by_replica) const;

  Transport transport_;
  std::vector<Part> parts_;  // in the order in which they are sent; the shared ones last
  std::vector<Way> to_owners_;
  Way from_owners_;
  MessagePlan plan_;
  std::vector<double> rows_;  // by replica
  bool weighted_ = true;
  at::Tensor loss_;
};

}  // namespace plumb
