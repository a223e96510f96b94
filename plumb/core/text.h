// Untrusted text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// Returns the length of the UTF-8 character at the front of a text that is not empty, 0 if there is none (RFC 3629).
size_t utf8_length(std::string_view text);
bool is_utf8(std::string_view text);

// Returns the text for a terminal, a log or Python: control characters but line ends and tabs, and bytes that are no
// UTF-8, as \xHH.
std::string printable(std::string_view text);

// Returns whether `text` fits a pattern in which * stands for any characters, also none, and ? for one. Linear in the
// text for each star.
bool matches_pattern(std::string_view pattern, std::string_view text);

// Returns the module of a name: "layers.0" of "layers.0.weight", "" of "weight".
std::string parent_of(const std::string& name);

// Splits at commas: "a,b" is a and b.
std::vector<std::string> split_commas(const std::string& text);

}  // namespace plumb
