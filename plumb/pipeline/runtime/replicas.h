// Data parallel beside pipeline: ranks of several pipelines that hold the same stages sum their gradients.
//
// A stage's gradients are summed as soon as its last weight gradient of the step is there, by a thread of their own,
// while the rank goes on with its other stages and earlier ranks with theirs. Every parameter belongs to one of the
// replicas: it gets the others' gradients, adds neighbors first ((0 + 1) + (2 + 3)), and hands the sum to all. So the
// sum does not depend on timing or on the number of messages, and all replicas have the same bits: those of one process
// with as many groups of microbatches (PipelineOptions::gradient_groups).
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "plumb/pipeline/runtime/gradients.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/runtime/timeline.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {

class ReplicaSums {
 public:
  // Blocks until all replicas have come. `description`: of layout and schedule, the same on all. `parameters`: of this
  // rank's stages; `shared`: those (by index) that are summed over copies first. `plan`: of this rank, the same on all
  // replicas. Throws Error(Communication) if replicas differ in any of this, or in their parameters' values.
  ReplicaSums(ProcessGroup group, const std::string& description,
              const std::map<int, std::vector<NamedTensor>>& parameters, std::map<int, std::set<int>> shared,
              const RunPlan& plan, const std::map<int, std::vector<NamedTensor>>& buffers = {});

  ~ReplicaSums();

  int rank() const { return transport_.group().rank(); }
  int size() const { return transport_.group().size(); }

  // `rows`: of this replica's batch; with `weighted` a replica's gradients count by its rows.
  void begin_step(double rows, bool weighted);
  // Called when the stage's own share of the step is there; nobody changes it until finish().
  void stage_done(int stage, const GradientAccumulator& gradients);
  // Throws the error of the sums so far, if there is one.
  void check() const;
  // Returns whether the stage's sums of this step are here.
  bool summed(int stage) const;
  // Waits for everything and puts the sums into the accumulators. `loss`: this replica's, summed over its rows in
  // float64; may be undefined. `buffers`: by stage those given at first, summed over this replica's groups, then over
  // all replicas; of whole numbers the first replica's.
  void finish(const std::map<int, GradientAccumulator*>& gradients, const at::Tensor& loss,
              std::map<int, Tensors>& buffers);
  // Returns the mean over all replicas by rows, in float64; undefined if one has none.
  const at::Tensor& loss() const { return loss_; }
  // Events of the last step, a ReduceGrad for every stage: `waiting` since its share was there, `start` and `end` of
  // sums.
  std::vector<TimelineEvent> timeline() const;

  // Gives the step up and tells the other replicas why.
  void tell_failure(const std::string& reason) noexcept;

 private:
  // Parameters that travel together: a stage's, or those summed over copies.
  struct Part {
    int stage;  // -1: summed over copies
    struct Member {
      int stage, index, owner;
      at::Tensor parameter;  // or buffer
      bool is_buffer = false;
    };
    std::vector<Member> members;
    // State of the running step. Handed over by the step's thread, ...
    bool handed = false;
    Tensors own;  // by member
    // ... and summed by the other.
    bool summed = false;
    Tensors sums;
    TimelineEvent event;
  };
  // Places in the plan by replica.
  struct Way {
    std::vector<int> sends, receives;
  };

  Way add_messages(int from, int phase);
  void hand_over(Part& part, const std::map<int, const GradientAccumulator*>& gradients,
                 const std::map<int, Tensors>& buffers = {});
  // Changes what both threads look at.
  void change(const std::function<void()>& what);
  // --- in the thread ---
  void run();
  void sum_all();
  void sum_part(size_t index);
  // Returns the tensors of another replica's message: `first`, then the gradients of the members that `owner` owns.
  std::vector<AgreedValue> agreed(const Part& part, int owner, std::vector<AgreedValue> first) const;
  at::Tensor add_up(const Part::Member& member, const std::vector<at::Tensor>& by_replica) const;

  Transport transport_;
  std::vector<int> peers_;   // the other replicas
  std::vector<Part> parts_;  // in the order in which they are summed; the shared ones last
  std::vector<Way> to_owners_, from_owners_;
  MessagePlan plan_;
  std::vector<double> rows_;  // by replica
  bool weighted_ = true;
  Tensors losses_;  // by replica
  at::Tensor loss_;

  mutable std::mutex lock_;
  std::condition_variable changed_;
  bool under_way_ = false;  // the thread works at a step
  bool given_up_ = false, closing_ = false;
  std::exception_ptr failure_;
  std::atomic<bool> failed_ = false;
  std::thread thread_;
};

}  // namespace plumb
