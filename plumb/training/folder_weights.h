// Programs that were imported without weights: each rank reads those of its stages, and writes them back.
#pragma once

#include "plumb/pipeline/transport/process_group.h"
#include "plumb/training/job.h"

namespace plumb {

// Returns whether every tensor has values: those of a program that was imported without weights are on the meta device.
bool has_values(const State& state);
// Returns the folder that a program without weights takes them from: `weights` (--weights), else the one that it was
// imported from. "" if the program has its weights. Throws UsageError that names --weights if the folder is missing, is
// another model's, or is not needed.
std::string weights_folder(const std::string& weights, const ExportedProgram& program);
// Loads those of weights_folder() into a program.
void load_folder_weights(const std::string& weights, const ExportedProgram& program);
// Called before processes meet: throws UsageError if weights are missing (--weights), or for --save-hf of a program
// that does not know a folder; Error for a folder that cannot be read or written.
void check_folders(const TrainOptions& options, const TrainJob& job);
// Called when the program is cut: throws UsageError if --save-hf could not write one of its weights after the training.
void check_weights_to_save(const TrainOptions& options, const TrainJob& job);
// Reads the values that this rank's stages lack, from --weights or the folder that was imported.
void load_folder_weights(const TrainOptions& options, const TrainJob& job, int rank);
// After a training, called by all ranks of the first pipeline: writes the folder --save-hf together. If a rank cannot,
// every rank throws Error, after all have tried.
void save_folder_weights(const TrainOptions& options, const TrainJob& job, const ProcessGroup& group);
// Called before every rank's stages are gathered: makes memory for those whose weights this rank did not read.
void make_room_for_weights(const TrainJob& job);

}  // namespace plumb
