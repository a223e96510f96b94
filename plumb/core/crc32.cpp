#include "plumb/core/crc32.h"

#include <array>
#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define PLUMB_CARRYLESS __attribute__((target("pclmul,sse4.1")))
#endif

namespace plumb {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;

// A remainder times x. Bit 31 is the coefficient of 1, bit 0 that of x^31.
constexpr uint32_t times_x(uint32_t c) { return (c & 1) ? kPolynomial ^ (c >> 1) : c >> 1; }

uint32_t u32(const unsigned char* p) {
  return uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
}

// Eight tables: eight bytes a step.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;
const CrcTables& crc_tables() {
  static const CrcTables tables = [] {
    CrcTables t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = times_x(c);
      t[0][i] = c;
    }
    for (size_t k = 1; k < 8; ++k) {
      for (size_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
    }
    return t;
  }();
  return tables;
}

// The remainder after `size` more bytes.
uint32_t by_tables(const unsigned char* p, uint64_t size, uint32_t c) {
  const auto& t = crc_tables();
  for (; size >= 8; size -= 8, p += 8) {
    const uint32_t a = c ^ u32(p), b = u32(p + 4);
    c = t[7][a & 0xFF] ^ t[6][a >> 8 & 0xFF] ^ t[5][a >> 16 & 0xFF] ^ t[4][a >> 24] ^ t[3][b & 0xFF] ^
        t[2][b >> 8 & 0xFF] ^ t[1][b >> 16 & 0xFF] ^ t[0][b >> 24];
  }
  for (; size; --size, ++p) c = t[0][(c ^ *p) & 0xFF] ^ (c >> 8);
  return c;
}

#ifdef PLUMB_CARRYLESS

// x^n as a factor of 64 bits: bit 63 is the coefficient of 1.
constexpr long long power_of_x(int n) {
  uint32_t c = 0x80000000u;
  for (; n > 0; --n) c = times_x(c);
  return static_cast<long long>(uint64_t(c) << 32);
}

// What moves 16 bytes `Bits` further on. The first eight of them are 64 bits further from the end; the product of two
// numbers with mirrored bits is one x too many.
template <int Bits>
constexpr long long kFirstHalf = power_of_x(Bits + 64 - 1);
template <int Bits>
constexpr long long kSecondHalf = power_of_x(Bits - 1);

PLUMB_CARRYLESS __m128i load(const unsigned char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// 16 bytes with the same remainder as `bytes` and, further on, `next`.
PLUMB_CARRYLESS __m128i move_on(__m128i bytes, __m128i factors, __m128i next) {
  const __m128i first = _mm_clmulepi64_si128(bytes, factors, 0x00);
  const __m128i second = _mm_clmulepi64_si128(bytes, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

// Writes 16 bytes that have, after remainder 0, the remainder that `blocks` times 64 bytes have after `c`.
PLUMB_CARRYLESS void fold(const unsigned char* p, uint64_t blocks, uint32_t c, unsigned char* folded) {
  const __m128i by_64 = _mm_set_epi64x(kSecondHalf<512>, kFirstHalf<512>);
  const __m128i by_16 = _mm_set_epi64x(kSecondHalf<128>, kFirstHalf<128>);
  __m128i w = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(c)));
  __m128i x = load(p + 16), y = load(p + 32), z = load(p + 48);
  while (--blocks > 0) {
    p += 64;
    w = move_on(w, by_64, load(p));
    x = move_on(x, by_64, load(p + 16));
    y = move_on(y, by_64, load(p + 32));
    z = move_on(z, by_64, load(p + 48));
  }
  z = move_on(move_on(move_on(w, by_16, x), by_16, y), by_16, z);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(folded), z);
}

#endif

}  // namespace

uint32_t crc32(const void* data, uint64_t size, uint32_t start) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t c = ~start;
#ifdef PLUMB_CARRYLESS
  static const bool can_multiply = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (const uint64_t blocks = size / 64; blocks > 0 && can_multiply) {
    unsigned char folded[16];
    fold(p, blocks, c, folded);
    c = by_tables(folded, sizeof folded, 0);
    p += blocks * 64;
    size -= blocks * 64;
  }
#endif
  return ~by_tables(p, size, c);
}

}  // namespace plumb
