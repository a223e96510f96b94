// Shared by the kernel files: bits, widening and narrowing, the random streams.
//
// Loops are plain where the compiler vectorizes them; the rest is written in Highway's vectors (`hn`), which exist for
// every instruction set. Each level is a file of its own with the compiler's options for it (room.cmake), so Highway's
// own dispatch, and its library, are not used. Everything has internal linkage and no template of the standard library
// is instantiated: no code for a newer CPU can leak into the rest of the library.
#pragma once

#include <cstdint>

// Vectors whose size only the running CPU knows could not be kept in arrays.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#define HWY_DISABLE_PCLMUL_AES  // not needed, and not every CPU with the rest of a level has it
#define HWY_IS_DEBUG_BUILD 0    // debug checks would need Highway's library
#if defined(__aarch64__)
#define TOOLCHAIN_MISS_SYS_AUXV_H  // no dispatch: its functions would ask for AES, and not be inlined without
#endif
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "plumb/numerics/element.h"

namespace plumb::kernel {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChunk = 4096;  // values that pass through L1 together

inline void widen(const BHalf* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen_one(from[i]);
}
inline void narrow(const float* from, int64_t n, BHalf* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = narrow_one(BHalf{}, from[i]);
}
inline void widen(const Half* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__F16C__) || HWY_ARCH_ARM_A64
  const hn::CappedTag<float, 8> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> halves;
  for (; i + int64_t(hn::Lanes(d)) <= n; i += int64_t(hn::Lanes(d)))
    hn::StoreU(hn::PromoteTo(d, hn::LoadU(halves, reinterpret_cast<const hwy::float16_t*>(from + i))), d, to + i);
#endif
  for (; i < n; ++i) to[i] = widen_one(from[i]);
}
inline void narrow(const float* from, int64_t n, Half* to) {
  int64_t i = 0;
#if defined(__F16C__) || HWY_ARCH_ARM_A64
  const hn::CappedTag<float, 8> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> halves;
  for (; i + int64_t(hn::Lanes(d)) <= n; i += int64_t(hn::Lanes(d)))
    hn::StoreU(hn::DemoteTo(halves, hn::LoadU(d, from + i)), halves, reinterpret_cast<hwy::float16_t*>(to + i));
#endif
  for (; i < n; ++i) to[i] = narrow_one(Half{}, from[i]);
}

// Values in the type that they are computed in: where they lie, or widened into `wide`.
inline const float* widened(const float* from, int64_t, float*) { return from; }
inline const double* widened(const double* from, int64_t, double*) { return from; }
template <class C>
inline const float* widened(const C* from, int64_t n, float* wide) {
  widen(from, n, wide);
  return wide;
}

// --- results too large for any cache: written past it, so that their lines are not read first

constexpr int64_t kStreamBytes = int64_t(16) << 20;

inline bool can_stream(const void* to) { return HWY_ARCH_X86 && reinterpret_cast<uintptr_t>(to) % 64 == 0; }
// `to` on a cache line's start. `next` is asked for meanwhile, as far as it will be read.
inline void stream(const void* from_void, int64_t bytes, void* to_void, const char* next) {
  const hn::CappedTag<uint8_t, 16> d;
  const uint8_t* from = static_cast<const uint8_t*>(from_void);
  uint8_t* to = static_cast<uint8_t*>(to_void);
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    hwy::Prefetch(next + i);
    for (int64_t k = i; k < i + 64; k += int64_t(hn::Lanes(d))) hn::Stream(hn::Load(d, from + k), d, to + k);
  }
  __builtin_memcpy(to + i, from + i, size_t(bytes - i));
}

// --- random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
//
// A group is 256 values in memory order. Of group g the values j, 64 + j, 128 + j and 192 + j (j < 64) take words 0 to
// 3 of the call with counter (64 g + j in 64 bits, 0, 'plmb') under the seed as key: vectors are stored as they come,
// and any split at groups gives the same numbers.

constexpr int kLanes = 64;
static_assert(kRandomGroup == 4 * kLanes);

// Words in the low halves of 64 bits, whatever is above them: what the processors multiply to 64 bits.
typedef uint64_t Wide __attribute__((vector_size(HWY_MAX_BYTES)));
inline auto words_of(Wide w) { return __builtin_bit_cast(hn::Vec<hn::ScalableTag<uint32_t>>, w); }
inline Wide multiply_low(Wide a, Wide b) { return __builtin_bit_cast(Wide, hn::MulEven(words_of(a), words_of(b))); }
constexpr int kWideLanes = sizeof(Wide) / 8;
constexpr int kPairLanes = 2 * kWideLanes;  // calls at once, in two vectors: one multiplies while the other waits
static_assert(kLanes % kPairLanes == 0);

class Random {
 public:
  // The group that next_group() gives first.
  Random(uint64_t seed, uint64_t group) : seed_(seed), counter_(group * kLanes) {
    for (int i = 0; i < kWideLanes; ++i) place_[i] = uint64_t(i);
    for (int round = 0; round < 8; ++round) {
      keys_[round][0] = Wide{} + uint32_t(uint32_t(seed) + uint32_t(round + 2) * kPhiloxKey0);
      keys_[round][1] = Wide{} + uint32_t(uint32_t(seed >> 32) + uint32_t(round + 2) * kPhiloxKey1);
    }
  }

  // (Inlined it costs the functions around it their registers.)
  __attribute__((noinline)) const uint32_t* next_group() {
    for (int lane = 0; lane < kLanes; lane += kPairLanes) {
      Wide a[2], b[2], c[2], d[2];
      for (int k = 0; k < 2; ++k)
        two_rounds(place_ + (counter_ + uint64_t(lane + k * kWideLanes)), a[k], b[k], c[k], d[k]);
#pragma GCC unroll 8
      for (int round = 0; round < 8; ++round) {
        for (int k = 0; k < 2; ++k) {
          const Wide p = multiply_low(a[k], Wide{} + kPhilox0), q = multiply_low(c[k], Wide{} + kPhilox1);
          a[k] = (q >> 32) ^ b[k] ^ keys_[round][0];
          b[k] = q;
          c[k] = (p >> 32) ^ d[k] ^ keys_[round][1];
          d[k] = p;
        }
      }
      store(a, lane), store(b, kLanes + lane), store(c, 2 * kLanes + lane), store(d, 3 * kLanes + lane);
    }
    counter_ += kLanes;
    return words_;
  }

 private:
  void store(const Wide (&pair)[2], int at) {
    const hn::ScalableTag<uint32_t> d;
    hn::Store(hn::ConcatEven(d, words_of(pair[1]), words_of(pair[0])), d, words_ + at);
  }

  // The first two rounds of counters (low, high half of counter_, 0, kPhiloxDomain): half of their products are of
  // numbers that all lanes share.
  void two_rounds(Wide low, Wide& a, Wide& b, Wide& c, Wide& d) const {
    const uint32_t key0 = uint32_t(seed_), key1 = uint32_t(seed_ >> 32);
    const uint64_t shared = uint64_t(kPhilox0) * (uint32_t(counter_ >> 32) ^ key0);
    const Wide p = multiply_low(low, Wide{} + kPhilox0);
    const Wide q = multiply_low((p >> 32) ^ (Wide{} + (kPhiloxDomain ^ key1)), Wide{} + kPhilox1);
    a = (q >> 32) ^ (Wide{} + uint32_t(key0 + kPhiloxKey0));
    b = q;
    c = p ^ (Wide{} + ((shared >> 32) ^ uint32_t(key1 + kPhiloxKey1)));
    d = Wide{} + (shared & 0xffffffffu);
  }

  const uint64_t seed_;
  uint64_t counter_;         // a multiple of kLanes: its low half does not overflow within a group
  Wide place_, keys_[8][2];  // keys of the rounds after two_rounds()
  alignas(64) uint32_t words_[kRandomGroup];
};

}  // namespace
}  // namespace plumb::kernel
