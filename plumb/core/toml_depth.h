// A check of TOML files before they are parsed: the parser recurses for every part of a dotted key.
#pragma once

#include <string>

namespace plumb {

// Throws Error(BadFile) for a line with more than 1000 dots, which a key with so many parts may be.
void check_toml_depth(const std::string& text, const std::string& file);

}  // namespace plumb
