// JSON from files and peers that nobody vouches for.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

namespace plumb {

// How deep lists and objects of a text are nested. Brackets in strings do not count.
int json_depth(std::string_view text);

// Returns the bytes that the document of a text takes at most while it is parsed, without the text: of 64-bit nlohmann
// values on glibc's heap. Broken texts have such a bound, too. From half a byte to about 45 a byte of text; of programs
// of torch.export 8.
uint64_t json_memory(std::string_view text);

// The document of a text. Time and memory are at most a constant times its length (json_memory()); whoever walks the
// document may recurse. Throws Error(BadFile) if the text is no JSON or nested deeper than `max_depth`.
nlohmann::json parse_json(std::string_view text, int max_depth = 64);

}  // namespace plumb
