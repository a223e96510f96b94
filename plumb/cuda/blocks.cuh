// Rounding to formats whose blocks share a scale: a thread works on a block, as kernel_blocks.h does.
#pragma once

#include "plumb/cuda/device.cuh"

namespace plumb::cuda_kernel {
namespace {

struct LargestArguments {
  const void* x;
  int64_t n;
  uint32_t* largest;  // bits of the largest magnitude but NaN; zero before
};

template <class C, int N>
inline void largest(const LargestArguments& a) {
  PLUMB_SHARED uint32_t most[kThreads];
  PLUMB_PHASE(t) {
    uint32_t mine = 0;
    for (int64_t q = block_index() * kThreads + t; q < quads_in<N>(a.n); q += block_count() * kThreads) {
      Quad<C, N> values;
      load(static_cast<const C*>(a.x), first_of_quad<N>(q), a.n, values);
      for (int p = 0; p < 4; ++p)
        for (int j = 0; j < N; ++j) mine = larger_magnitude<float>(mine, value_of(values.run[p].v[j]));
    }
    most[t] = mine;
  }
  for (int half = kThreads / 2; half > 0; half /= 2) PLUMB_PHASE(t) {
      if (t < half && most[t + half] > most[t]) most[t] = most[t + half];
    }
  PLUMB_PHASE(t) {
    if (t == 0) raise_atomically(a.largest, most[0]);
  }
}

struct BlocksArguments {
  const void* x;
  void* y;                  // may be x; or null
  uint8_t *codes, *scales;  // codes of elements, or null; scales of blocks
  float* unit;              // what scales are in units of, for the caller
  const uint32_t* largest;  // largest magnitude of the tensor, where the unit depends on it
  int64_t rows, length;
  uint64_t seed;
  float unit_divisor;  // largest element times largest scale
  float limit;         // what results are clamped to
  RoundingConstants<float> rounding;
  CodeConstants code_constants;
  Scaler<float> scaler;  // its unit is set here
};

// One block: values [begin, begin + count) of the tensor, from `in`, where they may also go. Writes codes and values.
template <class C, int kSize, bool kDivide, Way kWay, bool kSimple, class In, class Out, class Code>
inline uint8_t round_block(const BlocksArguments& a, const Scaler<float>& scaler, int64_t begin, int count,
                           const In& in, const Out& out, const Code& code) {
  uint32_t most = 0;
  for (int j = 0; j < count; ++j) most = larger_magnitude<float>(most, in(j));
  float down, up;
  const uint8_t scale = scaler.scale(most, down, up);
  for (int j = 0; j < count; ++j) {
    const float small = kDivide ? in(j) / down : in(j)*down;
    const uint32_t random = kWay == kByChance ? random_word(a.seed, uint64_t(begin + j)) : 0;
    const float rounded = round_one<float, kWay, kSimple>(small, random, a.rounding);
    if (a.codes) code(j, uint8_t(code_of<false>(rounded, a.code_constants)));
    float value = rounded * up;
    value = value > a.limit ? a.limit : value;
    value = value < -a.limit ? -a.limit : value;
    out(j, value);
  }
  return scale;
}

// kDivide: scales are no powers of two. kWhole: rows are whole numbers of blocks. Then a tile of as many blocks as
// there are threads goes through shared memory, so that neighboring threads read and write neighboring values.
template <class C, int kSize, bool kDivide, bool kWhole, Way kWay, bool kSimple>
inline void round_blocks(const BlocksArguments& a) {
  constexpr int kTile = kThreads * kSize, kRow = kSize + 1;  // a word more than a block: threads use different banks
  PLUMB_SHARED float tile[kWhole ? kThreads * kRow : 1];
  PLUMB_SHARED uint8_t tile_codes[kWhole ? kTile : 1];
  const C* x = static_cast<const C*>(a.x);
  C* y = static_cast<C*>(a.y);
  Scaler<float> scaler = a.scaler;
  if (kDivide) {
    const uint32_t most = *a.largest > scaler.limit ? scaler.limit : *a.largest;
    const float unit = from_bits(most) / a.unit_divisor;
    scaler.unit = unit > 0x1p-126f ? unit : 0x1p-126f;
  }
  PLUMB_PHASE(t) {
    if (t == 0 && block_index() == 0 && a.unit) *a.unit = scaler.unit;
  }
  const int64_t in_row = (a.length + kSize - 1) / kSize, blocks = a.rows * in_row;
  for (int64_t tile_begin = block_index() * kThreads; tile_begin < blocks; tile_begin += block_count() * kThreads) {
    if constexpr (kWhole) {
      const int64_t begin = tile_begin * kSize, left = blocks * kSize - begin;
      const int values = left < kTile ? int(left) : kTile;
      PLUMB_PHASE(t) {
        for (int i = t; i < values; i += kThreads) tile[i / kSize * kRow + i % kSize] = value_of(x[begin + i]);
      }
      PLUMB_PHASE(t) {
        float* row = tile + t * kRow;
        if (t * kSize < values) {
          const uint8_t scale = round_block<C, kSize, kDivide, kWay, kSimple>(
              a, scaler, begin + t * kSize, kSize, [&](int j) { return row[j]; },
              [&](int j, float value) { row[j] = value; },
              [&](int j, uint8_t code) { tile_codes[t * kSize + j] = code; });
          if (a.scales) a.scales[tile_begin + t] = scale;
        }
      }
      PLUMB_PHASE(t) {
        for (int i = t; i < values; i += kThreads) {
          if (y) y[begin + i] = narrow_to(C{}, tile[i / kSize * kRow + i % kSize]);
          if (a.codes) a.codes[begin + i] = tile_codes[i];
        }
      }
    } else {
      PLUMB_PHASE(t) {
        const int64_t block = tile_begin + t, row = block / in_row, place = block % in_row * kSize;
        const int64_t begin = row * a.length + place, left = a.length - place;
        if (block < blocks) {
          float kept[kSize];
          const int count = left < kSize ? int(left) : kSize;
          for (int j = 0; j < count; ++j) kept[j] = value_of(x[begin + j]);
          const uint8_t scale = round_block<C, kSize, kDivide, kWay, kSimple>(
              a, scaler, begin, count, [&](int j) { return kept[j]; },
              [&](int j, float value) {
                if (y) y[begin + j] = narrow_to(C{}, value);
              },
              [&](int j, uint8_t code) { a.codes[begin + j] = code; });
          if (a.scales) a.scales[block] = scale;
        }
      }
    }
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
