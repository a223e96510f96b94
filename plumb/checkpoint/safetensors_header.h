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

// Throws Error(InvalidArgument) or Error(Unsupported) for names and tensors that a file cannot hold. `place`: for
// messages, the file or folder they are for.
void check_holdable(const std::string& place, const NamedTensors& tensors);

// A file's bytes before its tensors' are known: the header, padded to 8 bytes, and by tensor where its bytes begin
// behind it. Those of large elements come first, so that each is aligned without gaps. Made by
// safetensors_layout(), which throws what check_holdable() throws, and for metadata that is no UTF-8 and a long header.
struct SafetensorsLayout {
  std::string header;
  std::vector<size_t> order;  // indices of the tensors, in the order of their bytes in the file
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0;  // total bytes of all tensors
};
SafetensorsLayout safetensors_layout(const std::string& place, const NamedTensors& tensors,
                                     const std::map<std::string, std::string>& metadata = {});

// Checks everything of a header that `data_bytes` bytes follow. `file` is for messages. Throws Error(BadFile).
SafetensorsHeader parse_safetensors_header(const std::string& file, std::string_view text, uint64_t data_bytes);

}  // namespace plumb
