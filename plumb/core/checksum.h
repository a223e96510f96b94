// Checksums of files and of messages between ranks.
#pragma once

#include <cstdint>

namespace plumb {

// CRC-32 as in zip files (polynomial 0xEDB88320, reflected). `start`: the checksum of the bytes before these. Where the
// CPU multiplies without carry, as fast as memory (some 10 GB/s); elsewhere 1 to 2 GB/s.
uint32_t crc32(const void* data, uint64_t size, uint32_t start = 0);
// CRC-64/XZ (polynomial of ECMA-182, annex B, reflected: 0xC96C5795D7870F42). `start` and speed as crc32().
uint64_t crc64(const void* data, uint64_t size, uint64_t start = 0);
// CRC-32C, that of TensorBoard's events (RFC 3720, appendix B.4: 0x82F63B78, reflected).
uint32_t crc32c(const void* data, uint64_t size, uint32_t start = 0);

// A checksum of bytes that come in pieces.
struct Checksum {
  int bits = 64;  // crc64, or 32: crc32
  uint64_t value = 0;
  void add(const void* data, uint64_t size);
  bool operator==(const Checksum&) const = default;
};

}  // namespace plumb
