// The machine that a kernel's text runs on: a GPU, or a host that runs its threads one after the other (tests do).
// Between barriers a kernel is a phase, whose body every thread of the block runs; nothing but shared memory lives from
// one phase to the next.
#pragma once

#include "plumb/numerics/element.h"

namespace plumb::cuda_kernel {
namespace {

using namespace kernel;

constexpr int kThreads = 128;  // threads of every block

#ifdef __CUDACC_RTC__

#define PLUMB_SHARED __shared__
#define PLUMB_PHASE(t) if (const int t = (__syncthreads(), int(threadIdx.x)); true)

inline int64_t block_index() { return blockIdx.x; }
inline int64_t block_count() { return gridDim.x; }
inline void add_atomically(uint32_t* to, uint32_t value) { atomicAdd(to, value); }
inline void add_atomically(uint64_t* to, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}
inline void raise_atomically(uint32_t* to, uint32_t value) { atomicMax(to, value); }

#else

#define PLUMB_SHARED
#define PLUMB_PHASE(t) \
  for (int t##_turn = 0, t = emulated_thread(0); t##_turn < kThreads; t = emulated_thread(++t##_turn))

// Threads run in order, or the last one first: where that changes a result, threads disturb each other in a phase.
struct EmulatedGrid {
  int64_t block = 0, blocks = 1;
  bool backwards = false;
};
inline EmulatedGrid& emulated_grid() {
  static EmulatedGrid grid;
  return grid;
}
inline int emulated_thread(int turn) { return emulated_grid().backwards ? kThreads - 1 - turn : turn; }
inline int64_t block_index() { return emulated_grid().block; }
inline int64_t block_count() { return emulated_grid().blocks; }
inline void add_atomically(uint32_t* to, uint32_t value) { *to += value; }
inline void add_atomically(uint64_t* to, uint64_t value) { *to += value; }
inline void raise_atomically(uint32_t* to, uint32_t value) { *to = value > *to ? value : *to; }

#endif

inline float narrow_to(float, float value) { return value; }
inline Half narrow_to(Half, float value) { return narrow_one(Half{}, value); }
inline BHalf narrow_to(BHalf, float value) { return narrow_one(BHalf{}, value); }

// N neighbors, moved by one instruction where they are 16 bytes.
template <class C, int N>
struct alignas(N * sizeof(C)) Pack {
  C v[N];
};

// A thread takes four runs of N values, 64 values apart, of one group of 256: the values that N calls of Philox serve
// (kernel_base.h), in four loads that are on their way together. Quad q of a tensor is the q-th of such fours.
constexpr int kQuadStride = kRandomGroup / 4;

template <int N>
inline int64_t quads_in(int64_t n) {
  return (n + kRandomGroup - 1) / kRandomGroup * (kQuadStride / N);
}
template <int N>
inline int64_t first_of_quad(int64_t q) {
  return q / (kQuadStride / N) * kRandomGroup + q % (kQuadStride / N) * N;
}

template <class C, int N>
struct Quad {
  Pack<C, N> run[4];
};

// Whether all of a quad's values are there; else those with an index below n are.
template <int N>
inline bool is_whole(int64_t first, int64_t n) {
  return first + 3 * kQuadStride + N <= n;
}

template <class C, int N>
inline void load(const C* x, int64_t first, int64_t n, Quad<C, N>& quad) {
  for (int p = 0; p < 4; ++p) {
    const int64_t at = first + p * kQuadStride;
    if (is_whole<N>(first, n)) {
      quad.run[p] = *reinterpret_cast<const Pack<C, N>*>(x + at);
    } else {
      for (int j = 0; j < N; ++j) quad.run[p].v[j] = at + j < n ? x[at + j] : C{};
    }
  }
}

template <class C, int N>
inline void store(C* y, int64_t first, int64_t n, const Quad<C, N>& quad) {
  for (int p = 0; p < 4; ++p) {
    const int64_t at = first + p * kQuadStride;
    if (is_whole<N>(first, n)) {
      *reinterpret_cast<Pack<C, N>*>(y + at) = quad.run[p];
    } else {
      for (int j = 0; j < N; ++j)
        if (at + j < n) y[at + j] = quad.run[p].v[j];
    }
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
