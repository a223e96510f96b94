#include "plumb/core/text.h"

#include <sstream>

namespace plumb {

size_t utf8_length(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char c = at(0);
  const size_t n = c < 0x80 ? 1 : c >= 0xC2 && c < 0xE0 ? 2 : c >= 0xE0 && c < 0xF0 ? 3 : c >= 0xF0 && c < 0xF5 ? 4 : 0;
  if (n == 0 || n > text.size()) return 0;
  for (size_t i = 1; i < n; ++i) {
    if ((at(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond U+10FFFF.
  if ((c == 0xE0 && at(1) < 0xA0) || (c == 0xED && at(1) >= 0xA0) || (c == 0xF0 && at(1) < 0x90) ||
      (c == 0xF4 && at(1) >= 0x90)) {
    return 0;
  }
  return n;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t n = utf8_length(text);
    if (n == 0) return false;
    text.remove_prefix(n);
  }
  return true;
}

std::string printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t n = utf8_length(text);
    const auto c = static_cast<unsigned char>(text.front());
    // U+0080 to U+009F are control characters too.
    const bool control = n == 1   ? (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F
                         : n == 2 ? c == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0
                                  : n == 0;
    for (size_t i = 0; i < (n == 0 ? 1 : n); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      if (control) {
        out += "\\x";
        out += kDigits[byte >> 4];
        out += kDigits[byte & 15];
      } else {
        out += text[i];
      }
    }
    text.remove_prefix(n == 0 ? 1 : n);
  }
  return out;
}

bool matches_pattern(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, after = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++, after = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p, ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1, t = ++after;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string parent_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::vector<std::string> split_commas(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace plumb
