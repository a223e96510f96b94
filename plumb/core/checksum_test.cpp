#include "plumb/core/checksum.h"

#include <gtest/gtest.h>

#include <string>

namespace plumb {
namespace {

TEST(Checksums, GiveThePublishedCheckValues) {
  EXPECT_EQ(crc32("123456789", 9), 0xCBF43926u);
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(crc64("123456789", 9), 0x995DC9BBDF1939FAu);
  EXPECT_EQ(crc32("", 0), 0u);
  EXPECT_EQ(crc64("", 0), 0u);
}

TEST(Checksums, GoOnFromTheBytesBefore) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(i * 37);
  for (const int bits : {32, 64}) {
    Checksum whole{bits};
    whole.add(bytes.data(), bytes.size());
    EXPECT_EQ(whole.value, bits == 64 ? crc64(bytes.data(), 1000) : crc32(bytes.data(), 1000));
    for (size_t cut : {0, 1, 7, 8, 9, 500, 1000}) {
      Checksum parts{bits};
      parts.add(bytes.data(), cut);
      parts.add(bytes.data() + cut, bytes.size() - cut);
      EXPECT_EQ(parts, whole) << cut;
    }
  }
}

// Bit by bit, as the polynomial says.
template <class T>
T plainly(const std::string& bytes, T polynomial) {
  T c = ~T{0};
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int k = 0; k < 8; ++k) c = (c & 1) ? polynomial ^ (c >> 1) : c >> 1;
  }
  return ~c;
}

TEST(Checksums, AreThePolynomialsForEveryLengthAndAlignment) {
  std::string bytes;
  uint32_t state = 1;
  for (int i = 0; i < 700; ++i) bytes += static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  for (size_t from : {0, 1, 7, 16}) {
    for (size_t size = 0; from + size <= bytes.size(); ++size) {
      const std::string part = bytes.substr(from, size);
      const char* at = bytes.data() + from;
      ASSERT_EQ(crc32(at, size), plainly<uint32_t>(part, 0xEDB88320u)) << from << ", " << size;
      ASSERT_EQ(crc32c(at, size), plainly<uint32_t>(part, 0x82F63B78u)) << from << ", " << size;
      ASSERT_EQ(crc64(at, size), plainly<uint64_t>(part, 0xC96C5795D7870F42u)) << from << ", " << size;
    }
  }
}

TEST(Checksums, NoticeEveryFlippedBit) {
  std::string bytes(300, 'a');
  const uint32_t whole = crc32(bytes.data(), bytes.size());
  const uint64_t longer = crc64(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_NE(crc32(bytes.data(), bytes.size()), whole) << bit;
    ASSERT_NE(crc64(bytes.data(), bytes.size()), longer) << bit;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
}

}  // namespace
}  // namespace plumb
