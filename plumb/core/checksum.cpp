#include "plumb/core/checksum.h"

#include <array>
#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define PLUMB_CARRYLESS __attribute__((target("pclmul,sse4.1")))
#endif

namespace plumb {
namespace {

uint64_t u64(const unsigned char* p) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | p[i];
  return value;
}

// By a polynomial over as many bits as T has, all mirrored: the highest bit is the coefficient of 1.
template <class T, T Polynomial>
struct Crc {
  // Returns a remainder times x.
  static constexpr T times_x(T c) { return (c & 1) ? Polynomial ^ (c >> 1) : c >> 1; }

  // Eight tables: eight bytes a step.
  using Tables = std::array<std::array<T, 256>, 8>;
  static const Tables& tables() {
    static const Tables made = [] {
      Tables t{};
      for (uint32_t i = 0; i < 256; ++i) {
        T c = i;
        for (int k = 0; k < 8; ++k) c = times_x(c);
        t[0][i] = c;
      }
      for (size_t k = 1; k < 8; ++k) {
        for (size_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
      }
      return t;
    }();
    return made;
  }

  // Returns the remainder after `size` more bytes.
  static T by_tables(const unsigned char* p, uint64_t size, T c) {
    const Tables& t = tables();
    for (; size >= 8; size -= 8, p += 8) {
      const uint64_t v = c ^ u64(p);
      c = t[7][v & 0xFF] ^ t[6][v >> 8 & 0xFF] ^ t[5][v >> 16 & 0xFF] ^ t[4][v >> 24 & 0xFF] ^ t[3][v >> 32 & 0xFF] ^
          t[2][v >> 40 & 0xFF] ^ t[1][v >> 48 & 0xFF] ^ t[0][v >> 56];
    }
    for (; size; --size, ++p) c = t[0][(c ^ *p) & 0xFF] ^ (c >> 8);
    return c;
  }

  // x^n as a factor of 64 bits: bit 63 is the coefficient of 1.
  static constexpr long long power_of_x(int n) {
    T c = T{1} << (8 * sizeof(T) - 1);
    for (; n > 0; --n) c = times_x(c);
    const uint64_t factor = uint64_t{c} << (64 - 8 * sizeof(T));
    return static_cast<long long>(factor);
  }

  // Factors that move 16 bytes by that many bits. The first eight bytes are 64 bits further from the end; the product
  // of two numbers with mirrored bits is one x too many.
  struct Move {
    long long first_half, second_half;
  };
  template <int Bits>
  static constexpr Move kMove{power_of_x(Bits + 64 - 1), power_of_x(Bits - 1)};

  static T of(const void* data, uint64_t size, T start);
};

using Crc32 = Crc<uint32_t, 0xEDB88320u>;
using Crc32c = Crc<uint32_t, 0x82F63B78u>;
using Crc64 = Crc<uint64_t, 0xC96C5795D7870F42u>;

#ifdef PLUMB_CARRYLESS

PLUMB_CARRYLESS __m128i load(const unsigned char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// 16 bytes with the same remainder as `bytes` and, further on, `next`.
PLUMB_CARRYLESS __m128i move_on(__m128i bytes, __m128i factors, __m128i next) {
  const __m128i first = _mm_clmulepi64_si128(bytes, factors, 0x00);
  const __m128i second = _mm_clmulepi64_si128(bytes, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

// Writes 16 bytes that have, after remainder 0, the remainder that `blocks` times 64 bytes have after `c`.
template <class Of>
PLUMB_CARRYLESS void fold(const unsigned char* p, uint64_t blocks, uint64_t c, unsigned char* folded) {
  constexpr auto far = Of::template kMove<512>, near = Of::template kMove<128>;
  const __m128i by_64 = _mm_set_epi64x(far.second_half, far.first_half);
  const __m128i by_16 = _mm_set_epi64x(near.second_half, near.first_half);
  __m128i w = _mm_xor_si128(load(p), _mm_cvtsi64_si128(static_cast<long long>(c)));
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

template <class T, T Polynomial>
T Crc<T, Polynomial>::of(const void* data, uint64_t size, T start) {
  const auto* p = static_cast<const unsigned char*>(data);
  T c = ~start;
#ifdef PLUMB_CARRYLESS
  static const bool can_multiply = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (const uint64_t blocks = size / 64; blocks > 0 && can_multiply) {
    unsigned char folded[16];
    fold<Crc>(p, blocks, c, folded);
    c = by_tables(folded, sizeof folded, 0);
    p += blocks * 64;
    size -= blocks * 64;
  }
#endif
  return ~by_tables(p, size, c);
}

}  // namespace

uint32_t crc32(const void* data, uint64_t size, uint32_t start) { return Crc32::of(data, size, start); }
uint32_t crc32c(const void* data, uint64_t size, uint32_t start) { return Crc32c::of(data, size, start); }
uint64_t crc64(const void* data, uint64_t size, uint64_t start) { return Crc64::of(data, size, start); }

void Checksum::add(const void* data, uint64_t size) {
  value = bits == 64 ? crc64(data, size, value) : crc32(data, size, static_cast<uint32_t>(value));
}

}  // namespace plumb
