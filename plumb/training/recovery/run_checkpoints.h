// A training's checkpoints: what goes into one, and going on from one at another layout.
#pragma once

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_writer.h"
#include "plumb/pipeline/transport/process_group.h"
#include "plumb/training/job.h"
#include "plumb/training/step/optimizer.h"

namespace plumb {

// options.checkpoints is the run's folder. A checkpoint holds the parameters and buffers under the model's names, the
// optimizer's state, and the position in the data. Masks of dropout are drawn by seed and step, so there is no
// generator to keep. Ranks of the first pipeline write, each the tensors whose first stage it holds.
class RunCheckpoints {
 public:
  // Made by all ranks of `world` together.
  RunCheckpoints(const TrainOptions& options, TrainJob& job, const ProcessGroup& world, const ReplicatedGroups& groups,
                 Optimizer& optimizer);

  // Loads the newest whole checkpoint of the folder's run into the stages, the optimizer and the data, takes its
  // gradient groups into job.pipeline if options give none, and returns its step; 0 if there is none. With
  // options.resume off the run is a new one: it goes on only from what this launch, or the attempt before of the same
  // job, has begun. Checkpoints of steps up to `after` are not loaded. `told` gets a sentence for each that is damaged
  // or of another run, on rank 0. Throws UsageError that names an option whose other value would make another run.
  int64_t resume(std::vector<std::string>& told, int64_t after = -1);
  // Returns the run's number, in each checkpoint and in the folder's run.json: on all ranks after resume() or
  // take_run().
  int64_t run() const { return run_; }
  void take_run(int64_t run) { run_ = run; }
  // Returns whether the folder says that this run has begun before, perhaps without having come to a checkpoint.
  bool has_begun() const { return begun_; }
  // Makes the folder this run's (run.json). All ranks of `world` call it once their other files are open.
  void begin();
  // Saves after `step`, if it is time, or `now`. Written in the background.
  void save(int64_t step, bool now);
  // Saves as save() does, and also if the last checkpoint that was due is not there: the loss of a rank may have ended
  // it. Called by all ranks of `world`, at the step that the run goes on after.
  void make_up(int64_t step, bool now);
  void wait();
  // Returns whether the last save is written, on rank 0; true elsewhere. Called after wait().
  bool has_last() const;
  // Throws Error(CannotWrite) on rank 0 if the last save failed. Called after wait().
  void require_last() const;
  // Called after a rank has failed: waits a few seconds at most for unwritten files.
  void abandon();
  // Returns the reports of the saves that have finished since the last call.
  std::vector<CheckpointReport> take_reports();

 private:
  nlohmann::json state(int64_t step) const;
  nlohmann::json same_run() const;
  std::optional<Checkpoint> find_own(std::vector<std::string>& told);
  void check_same_run(const nlohmann::json& state, const std::string& folder) const;
  bool is_unit_scaled() const;  // no plain model can take the weights
  void take_gradient_groups(const nlohmann::json& state, const std::string& folder);

  const TrainOptions& options_;
  TrainJob& job_;
  ProcessGroup world_;
  ReplicatedGroups groups_;
  Optimizer& optimizer_;
  NamedTensors held_;                         // parameters and buffers of this rank's stages, by their first names
  CheckpointPart part_;                       // this rank's part of a checkpoint; the optimizer's follows at each save
  std::set<std::string> owned_;               // names of parameters whose state this rank saves
  std::unique_ptr<CheckpointWriter> writer_;  // null: another pipeline's rank
  int64_t last_saved_ = -1;
  int64_t run_ = 0;
  bool begun_ = false;
};

// Returns "" if all ranks compute on one kind of machine, else a sentence that names the first rank on another one.
// Every rank calls it. Throws Error(Communication) if a peer is lost.
std::string other_machines(const ProcessGroup& world);

}  // namespace plumb
