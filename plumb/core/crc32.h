// The checksum of zip files and of histories.
#pragma once

#include <cstdint>

namespace plumb {

// CRC-32 as in zip files (polynomial 0xEDB88320, reflected). `start`: the checksum of the bytes before these.
uint32_t crc32(const void* data, uint64_t size, uint32_t start = 0);

}  // namespace plumb
