#include "plumb/core/toml_text.h"

#include <sstream>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {

toml::table parse_toml(std::string_view text, const std::string& file, const std::string& remedy) {
  constexpr size_t kMost = 1000;
  size_t line = 1, dots = 0;
  for (const char c : text) {
    if (c == '\n') ++line, dots = 0;
    if (c == '.' && ++dots > kMost)
      throw Error(ErrorKind::BadFile, str(file, ":", line, ": a key of more than ", kMost, " parts"), "",
                  "NAME = value lines");
  }
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& e) {
    throw Error(ErrorKind::BadFile, str(file, ":", e.source().begin.line, ": is no TOML: ", e.description()), "",
                remedy);
  }
}

std::string toml_string(const std::string& text) {
  using enum toml::format_flags;
  const toml::value<std::string> value(text);
  std::ostringstream out;
  out << toml::toml_formatter(
      value, toml::toml_formatter::default_flags & ~(allow_literal_strings | allow_multi_line_strings));
  return out.str();
}

}  // namespace plumb
