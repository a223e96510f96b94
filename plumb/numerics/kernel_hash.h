// Hashes of words (hash.h says of what). Compiled once per CPU level; see kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

constexpr int kHashBlock = 1024;  // words that share a table of keys

// Powers of kHashKey for the even words of a block. The two halves are multiplied apart, each in a low half.
struct HashKeys {
  uint64_t key[kHashBlock / 2], high[kHashBlock / 2];
  constexpr HashKeys() : key(), high() {
    uint64_t power = 1;
    for (int i = 0; i < kHashBlock / 2; ++i, power *= kHashKey * kHashKey) key[i] = power, high[i] = power >> 32;
  }
};
alignas(64) constexpr HashKeys kHashKeys;

template <class Word>
inline auto load_words(const Word* from) {
  const hn::ScalableTag<uint32_t> d;
  if constexpr (sizeof(Word) == 4)
    return hn::LoadU(d, from);
  else
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<Word, decltype(d)>(), from));
}

// Returns the sum of n <= kHashBlock words. An odd word's key is that of the even one before it, times kHashKey.
template <class Word>
inline uint64_t hash_block(const Word* x, int n) {
  const hn::ScalableTag<uint32_t> d;
  const hn::Repartition<uint64_t, decltype(d)> wide;
  const int lanes = int(hn::Lanes(d));
  auto even = hn::Zero(wide), even_high = even, odd = even, odd_high = even;
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    __builtin_prefetch(x + i + 4096 / int(sizeof(Word)));
    auto word = load_words(x + i);
    word = hn::Xor(word, hn::ShiftRight<16>(word));
    const auto next = hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, word)));
    const auto key = hn::BitCast(d, hn::Load(wide, kHashKeys.key + i / 2));
    const auto high = hn::BitCast(d, hn::Load(wide, kHashKeys.high + i / 2));
    even = hn::Add(even, hn::MulEven(word, key));
    even_high = hn::Add(even_high, hn::MulEven(word, high));
    odd = hn::Add(odd, hn::MulEven(next, key));
    odd_high = hn::Add(odd_high, hn::MulEven(next, high));
  }
  // Lanes are added here: GCC adds those of 512 bits as signed numbers, which must not overflow.
  const auto total = [&](auto low, auto upper) {
    HWY_ALIGN uint64_t part[hn::MaxLanes(decltype(wide)())];
    hn::Store(hn::Add(low, hn::ShiftLeft<32>(upper)), wide, part);
    uint64_t whole = 0;
    for (size_t lane = 0; lane < hn::Lanes(wide); ++lane) whole += part[lane];
    return whole;
  };
  uint64_t sum = total(even, even_high) + kHashKey * total(odd, odd_high);
  for (; i < n; ++i) sum += kHashKeys.key[i / 2] * (i % 2 ? kHashKey : 1) * mixed_word(x[i]);
  return sum;
}

template <class Word>
uint64_t hash_all(const void* x_void, int64_t n) {
  const Word* x = static_cast<const Word*>(x_void);
  uint64_t sum = 0, power = 1;
  for (int64_t i = 0; i < n; i += kHashBlock, power *= hash_power(kHashBlock))
    sum += power * hash_block(x + i, int(smaller(n - i, kHashBlock)));
  return sum;
}

}  // namespace
}  // namespace plumb::kernel
