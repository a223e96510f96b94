// Rounding to formats whose blocks share a scale. Compiled once per CPU level; see kernel_base.h.
//
// A chunk is divided by its blocks' scales, rounded as if it had none, and multiplied again; all three passes stay in
// L1.
#pragma once

#include "plumb/numerics/kernel_base.h"
#include "plumb/numerics/kernel_codes.h"
#include "plumb/numerics/kernel_round.h"

namespace plumb::kernel {
namespace {

template <class T, int kSize>
inline BitsOf<T> largest_of(const T* x) {
  BitsOf<T> largest = 0;
  for (int j = 0; j < kSize; ++j) largest = larger_magnitude(largest, x[j]);
  return largest;
}

template <class T, int kSize, bool kDivide>
inline void scale_blocks(const T* from, T* to, int blocks, const Scaler<T>& scaler, T* ups, uint8_t* codes) {
  for (int b = 0; b < blocks; ++b) {
    T down, up;
    const uint8_t code = scaler.scale(largest_of<T, kSize>(from + b * kSize), down, up);
    if (codes) codes[b] = code;
    ups[b] = up;
    for (int j = 0; j < kSize; ++j) {
      const T x = from[b * kSize + j];
      to[b * kSize + j] = kDivide ? x / down : x * down;
    }
  }
}

template <class T, int kSize>
inline void unscale_blocks(const T* from, T* to, int blocks, const T* ups, T limit) {
  for (int b = 0; b < blocks; ++b)
    for (int j = 0; j < kSize; ++j) {
      T y = from[b * kSize + j] * ups[b];
      y = y > limit ? limit : y;
      y = y < -limit ? -limit : y;
      to[b * kSize + j] = y;
    }
}

// Blocks as they come: rows need not be whole numbers of blocks, nor chunks of rows.
template <class C, class T>
inline void scale_ragged(const C* x, int64_t i, int m, int64_t length, const Scaler<T>& scaler, T* to, T* ups,
                         uint8_t* codes) {
  const int64_t size = scaler.spec.size, blocks_in_row = (length + size - 1) / size;
  for (int done = 0; done < m;) {
    const int64_t at = i + done, row = at / length, place = at % length, block = place / size;
    const int64_t begin = row * length + block * size, end = row * length + smaller(length, (block + 1) * size);
    BitsOf<T> largest = 0;
    for (int64_t k = begin; k < end; ++k) largest = larger_magnitude<T>(largest, value_of(x[k]));
    T down, up;
    const uint8_t code = scaler.scale(largest, down, up);
    if (codes) codes[row * blocks_in_row + block] = code;
    for (; done < m && i + done < end; ++done) {
      const T v = value_of(x[i + done]);
      to[done] = scaler.spec.power_of_two ? v * down : v / down;
      ups[done] = up;
    }
  }
}

template <class C>
void round_blocks_all(const void* x_void, void* y_void, int64_t begin, int64_t end, int64_t length,
                      const RoundingSpec& spec, const BlockSpec& block, double tensor_scale, uint64_t seed,
                      const CodeSpec* code_spec, uint8_t* codes, uint8_t* scales) {
  using T = typename ComputeOf<C>::type;
  const C* x = static_cast<const C*>(x_void);
  C* y = static_cast<C*>(y_void);
  const RoundingConstants<T> constants(spec);
  const RoundRun<T> run = choose_round<T>(spec);
  const Scaler<T> scaler(block, tensor_scale);
  // Powers of two cannot lead beyond the carrier, and infinity must be let through.
  const T limit = block.power_of_two ? T(__builtin_inf()) : T(block.largest);
  const bool whole = length % block.size == 0;
  Random random(seed, uint64_t(begin / kRandomGroup));
  alignas(64) T wide[kChunk];
  alignas(64) T ups[kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = int(smaller(end - i, kChunk));
    if (!whole) {
      scale_ragged<C, T>(x, i, m, length, scaler, wide, ups, scales);
    } else {
      const T* from = widened(x + i, m, wide);
      uint8_t* here = scales ? scales + i / block.size : nullptr;
      if (block.power_of_two)
        scale_blocks<T, 32, false>(from, wide, m / 32, scaler, ups, here);
      else
        scale_blocks<T, 16, true>(from, wide, m / 16, scaler, ups, here);
    }
    run(wide, wide, m, constants, &random);
    if (codes) codes_of(wide, codes + i, m, *code_spec);
    if (!y) continue;
    T* to = wide;
    if constexpr (kDirect<C>) to = y + i;
    if (!whole) {
      unscale_blocks<T, 1>(wide, to, m, ups, limit);
    } else if (block.power_of_two) {
      unscale_blocks<T, 32>(wide, to, m / 32, ups, limit);
    } else {
      unscale_blocks<T, 16>(wide, to, m / 16, ups, limit);
    }
    if constexpr (!kDirect<C>) narrow(wide, m, y + i);
  }
}

template <class C>
double largest_all(const void* x_void, int64_t n) {
  using T = typename ComputeOf<C>::type;
  const C* x = static_cast<const C*>(x_void);
  BitsOf<T> largest = 0;
  alignas(64) T wide[kDirect<C> ? 1 : kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int m = int(smaller(n - i, kChunk));
    const T* from = widened(x + i, m, wide);
    for (int j = 0; j < m; ++j) largest = larger_magnitude(largest, from[j]);
  }
  return double(from_bits(largest));
}

}  // namespace
}  // namespace plumb::kernel
