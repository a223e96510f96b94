#include "plumb/core/json_text.h"

#include <algorithm>
#include <string>

#include "plumb/core/error.h"

namespace plumb {

int json_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

nlohmann::json parse_json(std::string_view text, int max_depth) {
  // The parser does not recurse; dumping and walking do.
  if (json_depth(text) > max_depth)
    throw Error(ErrorKind::BadFile, "JSON nested deeper than " + std::to_string(max_depth));
  try {
    return nlohmann::json::parse(text.begin(), text.end());
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorKind::BadFile, std::string("is not JSON: ") + e.what());
  }
}

}  // namespace plumb
