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

// Bit by bit, as the polynomial says.
uint32_t plain_crc32(const std::string& bytes) {
  uint32_t c = ~0u;
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
  }
  return ~c;
}

TEST(Crc32, IsThePolynomialsForEveryLengthAndAlignment) {
  std::string bytes;
  uint32_t state = 1;
  for (int i = 0; i < 700; ++i) bytes += static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  for (size_t from : {0, 1, 7, 16}) {
    for (size_t size = 0; from + size <= bytes.size(); ++size) {
      ASSERT_EQ(crc32(bytes.data() + from, size), plain_crc32(bytes.substr(from, size))) << from << ", " << size;
    }
  }
}

TEST(Crc32, NoticesEveryFlippedBit) {
  std::string bytes(300, 'a');
  const uint32_t whole = crc32(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_NE(crc32(bytes.data(), bytes.size()), whole) << bit;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
}

}  // namespace
}  // namespace plumb
