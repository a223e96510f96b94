// JSON from untrusted files and peers.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace plumb {

// Returns the depth of nested lists and objects in a text. Brackets in strings do not count.
int json_depth(std::string_view text);

// Parses a JSON document. Time and memory are at most a constant (about 50 bytes a byte) times its length; code that
// walks the document may recurse. Throws Error(BadFile) if the text is no JSON or nested deeper than `max_depth`.
nlohmann::json parse_json(std::string_view text, int max_depth = 64);

}  // namespace plumb
