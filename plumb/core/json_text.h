// JSON from untrusted files and peers.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

namespace plumb {

// Returns the depth of nested lists and objects in a text. Brackets in strings do not count.
int json_depth(std::string_view text);

// Returns a bound of the bytes that parse_json() takes at most for a text and its document, the text left out: of
// 64-bit nlohmann values on glibc's heap. Up to about 50 bytes a byte of text; about 8 for programs of torch.export.
uint64_t json_memory(std::string_view text);

// Parses a JSON document. Time and memory are at most a constant times its length (json_memory()); code that walks the
// document may recurse. Throws Error(BadFile) if the text is no JSON or nested deeper than `max_depth`, and with
// `unique_keys` if an object has a key twice, of whose values one would be passed over in silence.
nlohmann::json parse_json(std::string_view text, int max_depth = 64, bool unique_keys = false);

}  // namespace plumb
