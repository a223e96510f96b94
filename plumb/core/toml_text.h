// TOML from files that people and others write.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

namespace plumb {

// Throws Error(BadFile), with the place in `file`, for a text that is no TOML, and for a line with more than 1000 dots,
// which a key with so many parts may be: the parser recurses for each. `remedy`: of a text that is no TOML.
toml::table parse_toml(std::string_view text, const std::string& file, const std::string& remedy);

// Returns the text as a TOML string of one line, in double quotes.
std::string toml_string(const std::string& text);

}  // namespace plumb
