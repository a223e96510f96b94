// checkpoint.json, the names of files and folders of a checkpoint, and the contents of one rank's list.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/exported/json_doc.h"

namespace plumb {

inline constexpr const char* kCheckpointJson = "checkpoint.json";
inline constexpr const char* kModelIndex = "model.safetensors.index.json";
inline constexpr const char* kOptimizerIndex = "optimizer.safetensors.index.json";

// "step-00000120" and back; nothing for any other name. `unfinished`: "step-00000120.writing-RUN".
std::string checkpoint_name(int64_t step);
std::optional<int64_t> step_of_checkpoint(const std::string& name);
std::optional<int64_t> step_of_unfinished(const std::string& name);
// Returns the steps of the finished checkpoints in a run's folder, ascending. Empty if there is no such folder.
std::vector<int64_t> checkpoint_steps(const std::string& run_folder);

// Returns whether a text is the plain name of a file with this ending, and leads nowhere else.
bool is_plain_file_name(const std::string& name, const std::string& ending);

nlohmann::json tensors_to_json(const std::map<std::string, CheckpointTensor>& tensors);
std::map<std::string, CheckpointTensor> tensors_from_json(const JsonDoc& doc, const Json& element);
std::map<std::string, std::string> texts_from_json(const JsonDoc& doc, const Json& element);

// A file beside the tensors: how long it is, and for a small one the checksum of its bytes.
struct CheckpointFile {
  uint64_t bytes = 0;
  std::optional<Checksum> checksum;
};

// Returns the text of checkpoint.json. It holds a checksum of itself: of its values, not of the spaces between.
// Checksums are "crc64" with 16 hexadecimal digits; version 1, which is read too, had "crc32" with a number.
std::string checkpoint_to_text(const CheckpointContents& contents, const std::map<std::string, CheckpointFile>& files);
// Checks the text, and the files that it names in `folder`. `path` is for messages. Throws Error(BadFile).
CheckpointContents checkpoint_from_text(const std::string& path, const std::string& folder, std::string_view text);

}  // namespace plumb
