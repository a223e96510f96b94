// Hashes of words (plumb/numerics/hash.h says of what).
#pragma once

#include "plumb/cuda/device.cuh"

namespace plumb::cuda_kernel {
namespace {

struct HashArguments {
  const void* words;
  int64_t n;
  uint64_t* sum;  // 0 at the start
};

template <class Word>
inline void hash(const HashArguments& a) {
  PLUMB_SHARED uint64_t sums[kThreads];
  PLUMB_PHASE(t) {
    const int64_t threads = block_count() * kThreads, first = block_index() * kThreads + t;
    const uint64_t step = hash_power(uint64_t(threads));
    uint64_t key = hash_power(uint64_t(first)), sum = 0;
    for (int64_t i = first; i < a.n; i += threads, key *= step)
      sum += key * mixed_word(static_cast<const Word*>(a.words)[i]);
    sums[t] = sum;
  }
  PLUMB_PHASE(t) {
    uint64_t sum = 0;
    for (int i = 0; t == 0 && i < kThreads; ++i) sum += sums[i];
    if (t == 0) add_atomically(a.sum, sum);
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
