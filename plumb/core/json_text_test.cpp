#include "plumb/core/json_text.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <string>

namespace plumb {
namespace {

std::string repeated(const std::string& part, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? "," : "") + part;
  return text + "]";
}

constexpr size_t kParser = 4096;  // freed bytes of the parser that the heap counts still

TEST(JsonText, MemoryOfADocumentIsAtMostWhatItsTextSays) {
  for (const std::string part :
       {"0", "[]", "{}", "\"\"", "[0]", "[[],[]]", "{\"\":0}", "{\"a\":0,\"b\":[],\"c\":\"d\"}", "\"sixteen letters.\"",
        "{\"a name of more than fifteen letters\":\"and a value of more than fifteen letters\"}", "\"\\\\\\\"[{,\"",
        "-1.5e300"}) {
    for (const int count : {0, 1, 3, 1000, 70000}) {
      const std::string text = repeated(part, count);
      const size_t before = ::mallinfo2().uordblks + ::mallinfo2().hblkhd;
      const nlohmann::json document = parse_json(text);
      const size_t after = ::mallinfo2().uordblks + ::mallinfo2().hblkhd;
      EXPECT_EQ(document.size(), static_cast<size_t>(count));
      EXPECT_LE(after - std::min(after, before), json_memory(text) + kParser) << part << " x " << count;
      EXPECT_LE(json_memory(text), 56 * text.size() + 100) << part << " x " << count;
    }
  }
}

TEST(JsonText, MemoryOfBrokenTextsIsBoundedToo) {
  for (const std::string text : {"", "\"", "\"\\", "[\"", "{\"a\\", "[[[[", ",,,,"}) EXPECT_LE(json_memory(text), 800u);
}

}  // namespace
}  // namespace plumb
