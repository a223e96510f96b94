#include "plumb/core/crc32.h"

#include <gtest/gtest.h>

#include <string>

namespace plumb {
namespace {

TEST(Crc32, GivesThePublishedCheckValue) {
  EXPECT_EQ(crc32("123456789", 9), 0xCBF43926u);
  EXPECT_EQ(crc32("", 0), 0u);
}

TEST(Crc32, GoesOnFromTheBytesBefore) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(i * 37);
  for (size_t cut : {0, 1, 7, 8, 9, 500, 1000}) {
    EXPECT_EQ(crc32(bytes.data() + cut, bytes.size() - cut, crc32(bytes.data(), cut)),
              crc32(bytes.data(), bytes.size()));
  }
}

}  // namespace
}  // namespace plumb
