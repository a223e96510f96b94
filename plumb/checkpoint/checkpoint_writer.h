// Writes checkpoints (checkpoint.h) from all ranks of a run, in the background, each rank its part.
//
// Ranks send each other nothing: they share the folder. Every rank writes its tensors and then a small file that lists
// them into `step-N.writing-RUN`. Rank 0 waits for these, writes the indices and checkpoint.json, and renames the
// folder. So a checkpoint is there whole or not at all, no matter which process is killed when. A save that fails
// changes nothing: the run goes on, its next save is tried, and problem() returns the error.
#pragma once

#include <nlohmann/json.hpp>

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/checkpoint/safetensors.h"

namespace plumb {

// One rank's tensors. A name that several ranks hold (replicas, a parameter of several stages) is to be given by one of
// them; if it is given by more, their bytes must be equal.
struct CheckpointPart {
  // By the model's own names. One tensor under several names is stored once, under the first.
  NamedTensors model;
  // "exp_avg/NAME" and the like (optimizer_state.h).
  NamedTensors optimizer;
  // Other names of tensors that this or another rank gives: name, and that which it is stored under.
  std::map<std::string, std::string> ties = {};
  bool unit_scaled = false;  // the model's weights: their files say so (kUnitScaledKey)
};

struct CheckpointOptions {
  int keep_last = 2;       // number of the newest that are kept; 0: all
  int64_t keep_every = 0;  // those of steps that this divides are kept, too; 0: none
  bool background = true;  // save() copies and returns; else it returns when all is done
  double timeout = 300;    // seconds that a rank waits for the others
};

struct CheckpointReport {
  int64_t step = 0;
  std::string folder;   // the checkpoint; empty if it could not be written
  std::string problem;  // what went wrong, naming rank and file; empty if nothing did
  double waited = 0;    // seconds that save() waited for the save before it,
  double copied = 0;    // copied this rank's part,
  double written = 0;   // and that writing it took after that
  uint64_t bytes = 0;   // bytes of this rank's tensors
};

class CheckpointWriter {
 public:
  // `run_folder` is made if it does not exist. `run_id`: the same on all ranks of this start of the run, and of no
  // other start: letters, digits, '-' and '_'. Rank 0 removes unfinished files of dead runs, so all ranks make their
  // writers before the first save. Throws Error(InvalidArgument), Error(CannotWrite), and on rank 0 Error(InvalidState)
  // if another run that is alive writes into the folder.
  CheckpointWriter(std::string run_folder, int rank, int world, std::string run_id, CheckpointOptions options = {});
  // As close().
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Copies the tensors to memory of the host, and writes them from there, after waiting for a save that still runs.
  // `state`: the trainer's own, that of rank 0 counts. All ranks call it with the same step; an existing checkpoint of
  // this step is replaced in one step, too. Throws Error(InvalidArgument) for a state that JSON cannot hold exactly
  // (infinity, NaN, text that is no UTF-8) and for names and tensors that a file cannot hold, and Error(InvalidState)
  // after close(); problem() returns errors of files and of other ranks.
  void save(int64_t step, const CheckpointPart& part, const nlohmann::json& state);
  // Waits until the last save is done on all ranks.
  void wait();
  // Waits likewise. Another writer may use the folder then, and this one no more; problem() and take_reports() still
  // tell of its last save.
  void close();
  // Ends waiting for other ranks: the save that runs fails. For runs that have lost a rank.
  void abandon() { abandoned_ = true; }
  // Returns the error of the last finished save, if it failed.
  std::optional<std::string> problem();
  // Returns the reports of the saves that have finished since the last call.
  std::vector<CheckpointReport> take_reports();

 private:
  void collect();
  CheckpointReport write(CheckpointPart part, const nlohmann::json& state, CheckpointReport report) noexcept;
  void publish(const nlohmann::json& state, const std::string& folder, CheckpointReport& report) const;
  void await_publication(const std::string& folder, CheckpointReport& report) const;
  void remove_unfinished(std::optional<int64_t> up_to_step) const;
  void remove_old(CheckpointReport& report) const;

  std::string run_folder_, run_id_;
  int rank_, world_;
  CheckpointOptions options_;
  int lock_ = -1;
  bool closed_ = false;
  std::atomic<bool> abandoned_ = false;
  std::future<CheckpointReport> running_;
  std::vector<CheckpointReport> reports_;
  std::string problem_;
};

// --- the lists that ranks write of their parts, and how parts become one checkpoint ---

// Keeps a tensor of several names under the first; the others go to the part's ties.
CheckpointPart without_copies_of_ties(const CheckpointPart& part);

// Writes a rank's tensors into `folder`, and the file that lists them last. Returns the number of bytes of its tensors.
uint64_t write_rank_files(const std::string& folder, int rank, const CheckpointPart& part);
// Writes the reason why a rank has no such file, in place of it.
void write_rank_problem(const std::string& folder, int rank, const std::string& problem) noexcept;

// Waits for the files of all ranks, in the order of ranks. It ends if `go_on` returns false. Throws
// Error(Communication) that names a rank that has a problem, or the missing ranks, and Error(InvalidState) for a tensor
// that differs between ranks.
CheckpointContents gather_rank_files(const std::string& folder, int world, const std::function<bool()>& go_on);

// Gives the tensors' files their last names ("model-00001-of-00002.safetensors"), writes the indices and
// checkpoint.json, and removes the ranks' lists.
void finish_folder(const std::string& folder, int world, CheckpointContents contents);

// Gives a folder up (rank 0): it is empty from now on and has another name, under which the other ranks see that.
void give_up_folder(const std::string& folder) noexcept;
bool is_given_up(const std::string& folder);

// Makes the entries of a folder durable. Throws Error(CannotWrite).
void sync_folder(const std::string& folder);

}  // namespace plumb
