#include "plumb/core/toml_depth.h"

#include "plumb/core/error.h"

namespace plumb {

void check_toml_depth(const std::string& text, const std::string& file) {
  constexpr size_t kMost = 1000;
  size_t line = 1, dots = 0;
  for (const char c : text) {
    if (c == '\n') ++line, dots = 0;
    if (c == '.' && ++dots > kMost) {
      throw Error(ErrorKind::BadFile,
                  file + ":" + std::to_string(line) + ": a key of more than " + std::to_string(kMost) + " parts", "",
                  "NAME = value lines");
    }
  }
}

}  // namespace plumb
