// --audit: what a rank's memory or its arithmetic does wrong is found, and the rank is replaced as a lost one.
//
// 1. The state's hash after an update is its hash before the next one. Replicas have the same hash after each update.
//    So is a sum of gradients from one microbatch to the next (PipelineOptions::gradient_changed).
// 2. In every audit_every-th step a stage's microbatch, by chance, runs again on another rank, in a gap of that rank's
//    next step: from its inputs, its outputs' gradients and the weights in the copies (state_copies.h). Hashes of its
//    outputs, its inputs' gradients and its parameters' gradients are compared.
//
// A rank that is wrong throws Error(ExecutionFailed) and ends, before the step that it was found in changes a weight.
// Copies of its state, and after 2. all copies of the edge after the audited step, are given up: the run goes on from
// the edge before.
#pragma once

#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/transport/transport.h"
#include "plumb/training/recovery/state_copies.h"
#include "plumb/training/step/train_step.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

// Throws UsageError if --audit can do nothing: nobody makes up for a rank that is wrong.
void check_audit(const TrainOptions& options);

// A stage of which one microbatch may be watched.
class AuditedStage : public GraphStage {
 public:
  AuditedStage(std::shared_ptr<GraphModule> module, const PipeTable& table, int index)
      : GraphStage(std::move(module), table, index), table_(table), index_(index) {}
  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override;
  // Watches the next run of this microbatch.
  void watch(int microbatch);
  // Makes the next run wrong: a bit of its first floating-point input is flipped where it computes (--inject).
  void compute_wrong() { wrong_ = true; }

  struct Seen {
    Tensors inputs, output_grads;
    NamedTensors buffers;             // state that a forward writes, as microbatches before this one had left it
    std::vector<bool> requires_grad;  // inputs
    RunRows rows;
    std::vector<std::pair<std::string, uint64_t>> hashes;  // by name, in the graph's order
  };
  // Returns what the watched run and its backward were, and forgets it. No inputs: there was none.
  Seen take();

 private:
  const PipeTable& table_;
  const int index_;
  std::shared_ptr<ScaleTracker> tracker_;
  std::unique_ptr<GraphStage> watched_stage_;            // the graph, as it was at watch(), with what the tracker needs
  std::vector<std::pair<int64_t, std::string>> hashed_;  // slots of outputs, inputs and parameters, and their names
  std::vector<int64_t> outputs_;                         // slots by output; -1: none
  size_t num_outputs_ = 0;                               // the first of hashed_
  int watched_ = -1;
  bool wrong_ = false;
  Seen seen_;
};

// Puts an AuditedStage in the place of each.
void watch_stages(const TrainJob& job, std::map<int, std::shared_ptr<StageFunction>>& stages);

// Does what a fault of these kinds is: flip, rot, rot_state or rot_gradient. Others: nothing.
void flip_bits(const Fault& fault, TrainStep& step);

// The stage and microbatch of a step, by chance, that rank `by` computes again for the rank that has computed them.
struct AuditChoice {
  int rank = 0, by = 0, stage = 0, microbatch = 0;
};
// Returns TrainOptions::audit_every; for 0 the number of steps whose work is 200 times what an audit repeats.
int64_t audit_period(const TrainOptions& options, const Schedule& schedule);
// Returns the same on all ranks.
AuditChoice audit_choice(const TrainOptions& options, const Schedule& schedule, int64_t step);

class Auditor {
 public:
  using Report = std::function<void(const event::AuditFailed&)>;
  // `copies`: null if the loss of a process ends the run. Only 1. is done then. All must outlive it.
  Auditor(const TrainOptions& options, TrainJob& job, const TrainRanks& ranks, TrainStep& step, StateCopies* copies,
          Report report);

  // Returns what is left out, and why, in a sentence; "" if nothing is.
  const std::string& left_out() const { return left_out_; }

  // Every rank calls these in this order, for every step of a run.
  void begin_step(int64_t step);
  void action_done(size_t done);
  // Called when a sum of this parameter's gradients is not what it was: throws as check() does.
  void gradient_changed(const std::string& parameter);
  // Before the step's numbers are shared: throws if this rank is wrong.
  void check();
  // After the update.
  void wrote();

 private:
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  void check_state();
  void check_replicas();
  void exchange();
  void run_again();
  std::vector<std::pair<std::string, uint64_t>> computed_again();
  [[noreturn]] void fail(const event::AuditFailed& found);
  [[noreturn]] static void stop(const event::AuditFailed& found);

  const TrainOptions& o_;
  TrainJob& job_;
  const TrainRanks& ranks_;
  TrainStep& step_;
  StateCopies* const copies_;
  const Report report_;
  std::unique_ptr<Transport> transport_;  // null: only 1. is done
  std::string left_out_;
  std::vector<std::pair<std::string, uint64_t>> written_;
  std::set<const c10::TensorImpl*> changing_;  // parameters that forwards write
  int64_t now_ = 0, period_;
  size_t gap_ = 0;                                // number of actions before it
  std::optional<AuditChoice> watched_, audited_;  // choices of this step, and of the one before, audited in this one
  std::optional<AuditedStage::Seen> received_;
  int64_t accused_ = -1;                                 // a rank, found here
  std::map<int, std::shared_ptr<AuditedStage>> others_;  // by stage
};

}  // namespace plumb
