// The lists that ranks write of their parts of a checkpoint, and how parts become one checkpoint.
#pragma once

#include <functional>
#include <string>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/checkpoint/checkpoint_writer.h"

namespace plumb {

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
