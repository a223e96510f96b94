// Factors of dropout: a value or zero, by chance.
#pragma once

#include "plumb/cuda/device.cuh"

namespace plumb::cuda_kernel {
namespace {

struct KeepArguments {
  void* y;
  int64_t n;
  uint64_t seed;
  float value;
  uint32_t last;
};

template <class C, int N>
inline void keep(const KeepArguments& a) {
  PLUMB_PHASE(t) {
    const C kept = narrow_to(C{}, a.value);
    for (int64_t q = block_index() * kThreads + t; q < quads_in<N>(a.n); q += block_count() * kThreads) {
      Quad<C, N> result;
      for (int j = 0; j < N; ++j) {
        const RandomWords random = random_words(a.seed, uint64_t(q) * N + j);
        for (int p = 0; p < 4; ++p) result.run[p].v[j] = random.word[p] <= a.last ? kept : C{};
      }
      store(static_cast<C*>(a.y), first_of_quad<N>(q), a.n, result);
    }
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
