// The header of a safetensors file: its grammar, and the dtypes of the format.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/checkpoint/safetensors.h"

namespace plumb {

inline constexpr uint64_t kLongestSafetensorsHeader = 100'000'000;  // that of the format's own readers

std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name);

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes; offsets from the end of the header
  std::map<std::string, std::string> metadata;
};

// Raises Error(InvalidArgument) or Error(Unsupported) for names and tensors that a file cannot hold. `place`: for
// messages, the file or folder they are for.
void check_holdable(const std::string& place, const NamedTensors& tensors);

// Checks everything of a header that is followed by so many bytes. `file` is for messages. Raises Error(BadFile).
SafetensorsHeader parse_safetensors_header(const std::string& file, std::string_view text, uint64_t data_bytes);

}  // namespace plumb
