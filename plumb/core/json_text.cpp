#include "plumb/core/json_text.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

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

uint64_t json_memory(std::string_view text) {
  // An object with k members has k strings for names and k - 1 commas: 64 and 96 k bytes. A list that grows has its
  // values of 16 bytes three times. The parser keeps a token, with the spaces before it, in two buffers that grow so.
  constexpr uint64_t kList = 80, kObject = 112, kString = 48, kComma = 48, kTextOnHeap = 24, kTextInPlace = 15,
                     kToken = 6;
  uint64_t bytes = 0;
  size_t token = 0, longest = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool ends = c == '[' || c == ']' || c == '{' || c == '}' || c == ',' || c == ':' || c == '"';
    if (ends) longest = std::max(longest, i - token), token = i;
    if (c == '[') bytes += kList;
    if (c == '{') bytes += kObject;
    if (c == ',') bytes += kComma;
    if (c != '"') continue;
    const size_t begin = ++i;
    while (i < text.size() && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
    const size_t length = std::min(i, text.size()) - begin;
    bytes += kString + (length > kTextInPlace ? length + kTextOnHeap : 0);
  }
  return bytes + kToken * std::max(longest, text.size() - token);
}

nlohmann::json parse_json(std::string_view text, int max_depth, bool unique_keys) {
  // The parser does not recurse; dumping and walking do.
  if (json_depth(text) > max_depth)
    throw Error(ErrorKind::BadFile, "JSON nested deeper than " + std::to_string(max_depth));
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // one set for each open object
  const auto note = [&](int, Event event, nlohmann::json& parsed) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw Error(ErrorKind::BadFile, "has '" + parsed.get<std::string>() + "' twice");
    return true;
  };
  try {
    const auto callback = unique_keys ? nlohmann::json::parser_callback_t(note) : nullptr;
    return nlohmann::json::parse(text.begin(), text.end(), callback);
  } catch (const nlohmann::json::exception& e) {
    const std::string what = e.what();  // begins with the library's name for it, in brackets
    throw Error(ErrorKind::BadFile, "is not JSON: " + what.substr(what.find("] ") + 2));
  }
}

}  // namespace plumb
