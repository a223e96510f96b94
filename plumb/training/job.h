// A training before its first step: the program, its cut, its schedule and its data.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plumb/exported/exported.h"
#include "plumb/partition/pipe.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/schedule/pipeline_plan.h"
#include "plumb/training/data/batches.h"
#include "plumb/training/options.h"
#include "plumb/training/recovery/fault.h"
#include "plumb/training/reports/events.h"
#include "plumb/training/step/gradients.h"
#include "plumb/transforms/formats/format_recipe.h"

namespace plumb {

// Callbacks while a training runs; all may be empty.
struct TrainHooks {
  // Called on rank 0; with event::Recomputed on each rank of the first pipeline.
  std::function<void(const TrainEvent& event)> event = {};
  // The work before the first step, by name: "reading model.pt2".
  std::function<void(const std::string& what)> phase = {};
  // After each action of a step on rank 0.
  std::function<void(int64_t step, size_t done, size_t total)> progress = {};
  // Asked on every rank at each step's end: the number of a signal on any of them ends the training of all then, 0 on
  // all of them does not. All ranks have one or none.
  std::function<int()> stop_signal = {};
};

// Objects that a caller has instead of files; both may be null.
struct TrainParts {
  std::shared_ptr<GraphModule> module;
  std::unique_ptr<BatchSource> batches;
  ExportedProgram record = {};  // the module's record that --save and --save-hf write; its own module does not count
};

struct TrainJob {
  ExportedProgram program;
  Schedule schedule;
  std::optional<PipelinePlan> plan;  // plan of --plan
  std::shared_ptr<Pipe> pipe;
  std::unique_ptr<BatchSource> batches;
  std::unique_ptr<Samples> eval_samples;  // null: no --eval-data
  PipelineOptions pipeline;
  std::optional<FormatRecipe> formats;  // recipe read from --formats
  std::vector<ModelParameter> trained;
  std::vector<std::vector<std::string>> by_group;  // names, by options.groups
  std::map<std::string, std::string> first_names;  // first name in the model of each name's tensor, by name
  std::vector<Fault> faults;
  bool tagged = false;
  int64_t rows = 0;  // rows of a step

  const GraphModule& module() const { return *program.module; }
  std::string first_name(const std::string& name) const {
    const auto found = first_names.find(name);
    return found == first_names.end() ? name : found->second;
  }
};

// Throws UsageError if a wire is given and there is one stage. The options are a command's own, before --recut.
void check_wire(const TrainOptions& options);
// Reads, checks and cuts: everything that can be wrong before processes meet. The options must be checked(). Throws
// UsageError or Error.
TrainJob prepare_job(const TrainOptions& options, TrainParts parts, const TrainHooks& hooks);

// Copies the pipe's weights into the program's own tensors, if these are others.
void take_trained(const TrainJob& job);

// Returns the path of this process's own history: each has one writer. `after`: prepares the history of a run that goes
// on after this step, perhaps in another layout. Its files stay one history: rank 0 takes the later steps out of files
// that no rank has any more, and gives the file of one process its rank's name.
std::string history_file(const TrainOptions& options, int rank, std::optional<int64_t> after = {});
// As history_file(), of --hashes: every process has one, `rank` is that of all.
std::string hashes_file(const TrainOptions& options, int rank, std::optional<int64_t> after);

}  // namespace plumb
