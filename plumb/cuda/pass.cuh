// One pass over a tensor: measure, round, measure again, write values or codes.
#pragma once

#include "plumb/cuda/measure.cuh"

namespace plumb::cuda_kernel {
namespace {

enum Output { kNoOutput, kValues, kCodes, kFiniteCodes };

struct PassArguments {
  const void* x;
  void* y;  // values as x's, may be x; or codes
  int64_t n;
  uint64_t seed;
  RoundingConstants<float> rounding;
  CodeConstants codes;
  // A part for each block, and 256 counts in all; before rounding and after it.
  Gathered *before, *after;
  uint64_t *counts_before, *counts_after;
};

// C: the values' type; N: neighbors that are moved together, 1 where memory is not aligned for more.
template <class C, int N, Way kWay, bool kSimple, Output kOutput, bool kBefore, bool kAfter, bool kHistogram>
inline void pass(const PassArguments& a) {
  constexpr bool kCodesOut = kOutput == kCodes || kOutput == kFiniteCodes;
  constexpr int kBins = kHistogramBins * kCopies;
  PLUMB_SHARED Gathered parts[kBefore || kAfter ? kThreads : 1];
  PLUMB_SHARED Gathered parts_after[kBefore && kAfter ? kThreads : 1];
  PLUMB_SHARED uint32_t exponents[kHistogram && kBefore ? kBins : 1];
  PLUMB_SHARED uint32_t exponents_after[kHistogram && kAfter ? kBins : 1];
  Gathered* const after = kBefore ? parts_after : parts;
  if constexpr (kHistogram) {
    PLUMB_PHASE(t) {
      for (int i = t; i < kBins; i += kThreads) {
        if (kBefore) exponents[i] = 0;
        if (kAfter) exponents_after[i] = 0;
      }
    }
  }
  PLUMB_PHASE(t) {
    const C* x = static_cast<const C*>(a.x);
    const RoundingConstants<float> rounding = a.rounding;
    Sums sums_before, sums_after;
    for (int64_t q = block_index() * kThreads + t; q < quads_in<N>(a.n); q += block_count() * kThreads) {
      const int64_t first = first_of_quad<N>(q);
      Quad<C, N> values;
      Quad<uint8_t, N> codes;
      load(x, first, a.n, values);
      for (int j = 0; j < N; ++j) {
        RandomWords random{};
        if (kWay == kByChance) random = random_words(a.seed, uint64_t(q) * N + j);
        for (int p = 0; p < 4; ++p) {
          const float value = value_of(values.run[p].v[j]);
          const bool there = first + p * kQuadStride + j < a.n;
          if (kBefore && there) {
            sums_before.take(value);
            if (kHistogram) count_exponent(exponents, t, value);
          }
          if (kOutput == kNoOutput) continue;
          const float rounded = round_one<float, kWay, kSimple>(value, random.word[p], rounding);
          if (kAfter && there) {
            sums_after.take(rounded);
            if (kHistogram) count_exponent(exponents_after, t, rounded);
          }
          if constexpr (kCodesOut)
            codes.run[p].v[j] = uint8_t(code_of<kOutput == kFiniteCodes>(rounded, a.codes));
          else
            values.run[p].v[j] = narrow_to(C{}, rounded);
        }
      }
      if constexpr (kCodesOut)
        store(static_cast<uint8_t*>(a.y), first, a.n, codes);
      else if (kOutput == kValues)
        store(static_cast<C*>(a.y), first, a.n, values);
    }
    if (kBefore) parts[t] = sums_before.gathered();
    if (kAfter) after[t] = sums_after.gathered();
  }
  if (kBefore) merge_threads(parts);
  if (kAfter) merge_threads(after);
  PLUMB_PHASE(t) {
    if (kBefore && t == 0) a.before[block_index()] = parts[0];
    if (kAfter && t == 0) a.after[block_index()] = after[0];
    for (int bin = t; kHistogram && bin < kHistogramBins; bin += kThreads) {
      uint64_t count = 0, count_after = 0;
      for (int copy = 0; copy < kCopies; ++copy) {
        if (kBefore) count += exponents[bin * kCopies + copy];
        if (kAfter) count_after += exponents_after[bin * kCopies + copy];
      }
      if (count) add_atomically(a.counts_before + bin, count);
      if (count_after) add_atomically(a.counts_after + bin, count_after);
    }
  }
}

// --- codes back to values: a table of the 256 values

struct DecodeArguments {
  const uint8_t* codes;
  void* y;
  int64_t n;
  float values[256];
};

template <class C, int N>
inline void decode(const DecodeArguments& a) {
  PLUMB_SHARED float values[256];
  PLUMB_PHASE(t) {
    for (int i = t; i < 256; i += kThreads) values[i] = a.values[i];
  }
  PLUMB_PHASE(t) {
    for (int64_t q = block_index() * kThreads + t; q < quads_in<N>(a.n); q += block_count() * kThreads) {
      const int64_t first = first_of_quad<N>(q);
      Quad<uint8_t, N> codes;
      Quad<C, N> result;
      load(a.codes, first, a.n, codes);
      for (int p = 0; p < 4; ++p)
        for (int j = 0; j < N; ++j) result.run[p].v[j] = narrow_to(C{}, values[codes.run[p].v[j]]);
      store(static_cast<C*>(a.y), first, a.n, result);
    }
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
