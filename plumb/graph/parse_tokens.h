// The tokens of a graph's text. Internal to its parser and printer (parse.cpp, print.cpp).
#pragma once

#include <cctype>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "plumb/core/error.h"
#include "plumb/core/text.h"

namespace plumb {

// The types of values that are no tensors, as ValueType has them from Int on, and torch's memory formats by number.
inline constexpr std::string_view kValueTypes[] = {"int", "float", "bool", "other"};
inline constexpr std::string_view kMemoryFormats[] = {"contiguous_format", "preserve_format", "channels_last",
                                                      "channels_last_3d"};

// An error in a text, with the line and column at its start.
struct ParseError : Error {
  explicit ParseError(const std::string& message) : Error(ErrorKind::InvalidGraph, message) {}
};

class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(const std::string& message) const { fail_at(at_, message); }
  [[noreturn]] void fail_at(size_t at, const std::string& message) const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at && i < text_.size(); ++i) {
      if (text_[i] == '\n') {
        ++line;
        column = 1;
      } else {
        ++column;
      }
    }
    throw ParseError("line " + std::to_string(line) + ", column " + std::to_string(column) + ": " + message);
  }

  void skip_space() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
        ++at_;
      } else if (text_[at_] == '#') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else {
        return;
      }
    }
  }
  bool peek(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool accept(char c) {
    if (!peek(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "'" + found());
  }
  std::string found() const {
    if (at_ >= text_.size()) return ", found the end of the text";
    return std::string(", found '") + text_[at_] + "'";
  }
  // Returns the characters from here on for which `is` holds.
  template <class Is>
  std::string_view take(const Is& is) {
    const size_t start = at_;
    while (at_ < text_.size() && is(text_[at_])) ++at_;
    return text_.substr(start, at_ - start);
  }
  static bool word_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
  std::string_view word() {
    skip_space();
    return take(word_char);
  }
  std::string_view peek_word() {
    size_t start = (skip_space(), at_);
    auto w = word();
    at_ = start;
    return w;
  }
  // Reads an element with each call of `read`, with commas between, up to the closing bracket.
  template <class Read>
  void elements(char close, const Read& read) {
    for (bool first = true; !accept(close); first = false) {
      if (!first) expect(',');
      read();
    }
  }
  void expect_word(std::string_view w) {
    skip_space();
    size_t start = at_;
    if (word() != w) fail_at(start, "expected '" + std::string(w) + "'");
  }
  bool accept_word(std::string_view w) {
    if (peek_word() != w) return false;
    word();
    return true;
  }
  std::string value_name() {
    expect('%');
    const std::string_view name = take(word_char);
    if (name.empty()) fail("expected a value's name after '%'");
    return std::string(name);
  }
  std::string quoted() {
    expect('"');
    std::string result;
    while (true) {
      if (at_ >= text_.size()) fail("a string is not closed");
      char c = text_[at_++];
      if (c == '"') {
        if (!is_utf8(result)) fail("a string is no UTF-8 text");
        return result;
      }
      if (c != '\\') {
        result += c;
        continue;
      }
      if (at_ >= text_.size()) fail("a string is not closed");
      char e = text_[at_++];
      if (e == 'x') {
        unsigned code = 0;
        if (at_ + 2 > text_.size() ||
            std::from_chars(text_.data() + at_, text_.data() + at_ + 2, code, 16).ptr != text_.data() + at_ + 2)
          fail("\\x takes two hexadecimal digits");
        at_ += 2;
        result += static_cast<char>(code);
      } else if (e == '"' || e == '\\') {
        result += e;
      } else {
        fail(std::string("unknown escape '\\") + e + "'");
      }
    }
  }
  int64_t integer() {
    skip_space();
    int64_t v = 0;
    auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), v);
    if (error != std::errc()) fail("expected an integer" + found());
    at_ = static_cast<size_t>(end - text_.data());
    return v;
  }

 protected:
  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace plumb
