#include "plumb/training/data/permutation.h"

#include "plumb/core/mix_bits.h"

namespace plumb {

Permutation::Permutation(int64_t n, uint64_t key) : n_(static_cast<uint64_t>(n)) {
  while (2 * half_bits_ < 62 && (n_ - 1) >> (2 * half_bits_) != 0) ++half_bits_;
  mask_ = (uint64_t{1} << half_bits_) - 1;
  for (size_t round = 0; round < keys_.size(); ++round) keys_[round] = mix_bits(mix_bits(key) + round);
}

int64_t Permutation::operator()(int64_t i) const {
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half_bits_, right = x & mask_;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (mix_bits(right ^ key) & mask_);
      left = right;
      right = next;
    }
    x = left << half_bits_ | right;
  } while (x >= n_);
  return static_cast<int64_t>(x);
}

}  // namespace plumb
