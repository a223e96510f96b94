#include "plumb/core/text.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/core/toml_text.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

TEST(Text, KnowsUtf8FromOtherBytes) {
  for (const char* text : {"", "plain", "\xC3\xA4", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "a\nb\t\x7F"})
    EXPECT_TRUE(is_utf8(text));
  for (const char* text : {"\xFF", "\xC3", "\xC0\xAF", "\xE0\x80\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "a\x80"})
    EXPECT_FALSE(is_utf8(text));
}

TEST(Text, PrintsWhatWouldSteerATerminal) {
  EXPECT_EQ(printable("layer.0\n\t\xC3\xA4"), "layer.0\n\t\xC3\xA4");
  EXPECT_EQ(printable("\x1B[2J\r\x7F"), "\\x1b[2J\\x0d\\x7f");
  EXPECT_EQ(printable("\xC2\x9B"
                      "2J"),
            "\\xc2\\x9b2J");
  EXPECT_EQ(printable("\xFFz\xC3"), "\\xffz\\xc3");
}

TEST(Text, ErrorsAreAlwaysPrintable) {
  const Error error(ErrorKind::BadFile, "a \xFF", "b \x1B", "c \x80");
  EXPECT_STREQ(error.what(), "a \\xff\n  at: b \\x1b\n  try: c \\x80");
  EXPECT_EQ(error.message(), "a \\xff");
}

TEST(Text, PatternsFitAsInAShell) {
  EXPECT_TRUE(matches_pattern("*", ""));
  EXPECT_TRUE(matches_pattern("layers.*.attn*", "layers.10.attn.qkv.weight"));
  EXPECT_TRUE(matches_pattern("a?c", "abc"));
  EXPECT_TRUE(matches_pattern("*a*a*", "banana"));
  EXPECT_FALSE(matches_pattern("a?c", "ac"));
  EXPECT_FALSE(matches_pattern("layers.*.attn", "layers.0.attn.qkv"));
  EXPECT_FALSE(matches_pattern("", "a"));
  EXPECT_FALSE(matches_pattern("head", "head.weight"));
  EXPECT_FALSE(matches_pattern("?", ""));
  EXPECT_FALSE(matches_pattern(std::string(2000, '*') + "b", std::string(2000, 'a')));
}

TEST(Text, SplitsAtCommas) {
  EXPECT_EQ(split_commas("a,b"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(split_commas("a,,b,"), (std::vector<std::string>{"a", "", "b"}));
  EXPECT_TRUE(split_commas("").empty());
}

TEST(Text, IsWrittenAsATomlStringOfOneLineThatReadsBackTheSame) {
  for (const std::string text : {"adamw", "it's", "a \"word\"", "C:\\runs", "two\nlines", "\x01", ""}) {
    const std::string written = toml_string(text);
    EXPECT_TRUE(written.starts_with('"') && written.find('\n') == std::string::npos) << written;
    EXPECT_EQ(parse_toml("x = " + written, "options.toml", "")["x"].value<std::string>(), text);
  }
}

// A sanitizer sees the undefined behavior that it is with toml++ 3.3 as it comes.
TEST(Toml, ALetterOutsideOfTextsIsAnError) {
  for (const char* text : {"\u00f6 = 1", "x \u0330= 1", "x = 1 \u3001"})
    EXPECT_THAT(message_of([&] { parse_toml(text, "options.toml", ""); }),
                ::testing::HasSubstr("options.toml:1: is no TOML"));
}

}  // namespace
}  // namespace plumb
