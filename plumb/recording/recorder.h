// Records what a model's tensors and gradients do while it trains, as rules say, into a history on disk.
//
//   plumb::Recorder recorder(*module, plumb::RecordRules::load("rules.toml"), "run.history");
//   for (...) {
//     loss.backward();
//     optimizer.step();
//     recorder.step({{"loss", loss.item<double>()}});
//   }
//
// The module's graph gets plumb::track nodes; values and gradients stay what they were. In steps that no rule asks for
// the nodes pass values through unmeasured, and always when the recorder is gone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/recording/history.h"
#include "plumb/recording/rules.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

struct RecorderOptions {
  bool append = false;  // go on with a history that is there, after its last step
  // With `append`: the step that the run goes on after, whatever step the history ends with; later steps are cut off.
  std::optional<int64_t> after = {};
  bool part = false;  // what is attached is a part of the model, a pipeline's stage: rules may fit nothing in it
  int64_t ranks = 0;  // ranks of the run that write a file each; 0: unknown
};

// A tensor that a tracker measures.
struct TrackedTensor {
  int64_t slot = 0;
  HistoryTensor tensor;        // without a number for its inputs
  std::vector<size_t> inputs;  // the nearest of these tensors that it is computed from
  bool state = false;          // a parameter or buffer
};
// Returns those of a module's plumb::track nodes, in the graph's order.
std::vector<TrackedTensor> tracked_tensors(const GraphModule& module, const ScaleTracker& tracker);

// Not thread-safe: attach() and step() are called between steps of training.
class Recorder {
 public:
  using Scalars = std::vector<std::pair<std::string, double>>;

  // Errors: those of HistoryWriter and of attach(), and Error(InvalidArgument) for rules whose `every` or `limit` is
  // below 1 or that have no pattern, and for `after` that is no step.
  Recorder(GraphModule& module, RecordRules rules, const std::filesystem::path& path, RecorderOptions options = {});
  // For modules that are attached later.
  Recorder(RecordRules rules, const std::filesystem::path& path, RecorderOptions options = {});
  ~Recorder();

  // Records this graph too: the same model for other shapes, or a part of a model. `stage`: its index, if the part is
  // a stage of a pipeline. Tensors of the same name, operator, sizes and stage are one. Throws Error(UnknownName)
  // for a rule that fits no tensor of any module so far, with the names there are.
  void attach(GraphModule& module, int64_t stage = -1);

  // Ends the step: writes the rows that its rules ask for, and prepares the next. If a module ran several times
  // (microbatches), a value's and a gradient's elements of all runs are measured as one tensor (MetricsSum); of
  // parameters' and buffers' values the last counts. Steps count from 1. Returns the number of rows written.
  size_t step(const Scalars& scalars = {});
  // Adds a tensor's hash to the running step (of state between steps, say). Throws what hash_of() throws.
  void add_hash(HistoryTensor tensor, const at::Tensor& values);
  // Sets the number of the step that runs now. Throws Error(InvalidArgument) unless it is after the history's last one.
  void set_step(int64_t step);
  // Returns the rows of the last step() that wrote any, as a history of that one step; empty before.
  History written() const;
  // Returns the number of the step that runs now.
  int64_t current_step() const { return step_; }

  // Off, nothing is measured: for evaluation between steps.
  void set_enabled(bool enabled);
  bool enabled() const { return enabled_; }

 private:
  struct Place;
  struct Part;
  struct Seen;
  bool due(size_t rule) const;
  void prepare();
  std::vector<Seen> seen() const;
  void find_rows(HistoryStep& step, std::vector<HistoryEvent>& events);
  void find_hashes(std::vector<HistoryHash>& hashes) const;

  const RecordRules rules_;
  const bool part_;
  HistoryWriter writer_;
  std::vector<Part> parts_;
  HistoryStep written_;
  std::vector<HistoryHash> added_;    // by add_hash()
  std::vector<bool> fitted_;          // rules that fit some tensor
  std::vector<int64_t> recorded_;     // steps, of rules with a condition
  std::vector<bool> due_, prepared_;  // rules: in this step; for which the trackers are set
  int64_t step_ = 1;
  bool enabled_ = true, all_ = false, measuring_ = false;
};

}  // namespace plumb
