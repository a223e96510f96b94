// The body of each kernels_<level>.cpp: one table of functions over all carriers. See kernel_base.h.
#pragma once

#include "plumb/numerics/kernel_base.h"
#include "plumb/numerics/kernel_blocks.h"
#include "plumb/numerics/kernel_codes.h"
#include "plumb/numerics/kernel_hash.h"
#include "plumb/numerics/kernel_measure.h"
#include "plumb/numerics/kernel_round.h"

namespace plumb::kernel {

extern const KernelTable baseline_kernels, avx2_kernels, avx512_kernels;

namespace {

// True if codes were asked for and fit.
template <class C>
bool round_pass(const void* x_void, void* y_void, int64_t n, const RoundingSpec& spec, uint64_t seed,
                int64_t first_block, Partial* before, Partial* after, uint8_t* codes, const CodeSpec* code_spec) {
  using T = typename ComputeOf<C>::type;
  const C* x = static_cast<const C*>(x_void);
  C* y = static_cast<C*>(y_void);
  const RoundingConstants<T> constants(spec);
  const RoundRun<T> run = choose_round<T>(spec);
  const bool chance = spec.mode == RoundingSpec::Stochastic;
  const bool streams =
      kDirect<C> && y && n * int64_t(sizeof(C)) >= kStreamBytes && x_void != y_void && can_stream(y_void);
  Random random(seed, uint64_t(first_block) * (kRandomBlock / kRandomGroup));
  if constexpr (sizeof(C) == 4) {
    if (streams && !before && !after && !codes && run == round_run<float, kNearestByAddition, true>) {
      const int64_t whole = n / kStreamGroup * kStreamGroup;
      stream_rounded(x, y, whole, constants);
      hwy::FlushStream();
      run(x + whole, y + whole, n - whole, constants, nullptr);
      return false;
    }
  }
  if constexpr (kDirect<C>) {
    if (!before && !after && !codes && !chance && !streams) {
      run(x, y, n, constants, nullptr);
      return false;
    }
  }
  Partial unused;
  Measurer<T> measure_before(before ? *before : unused), measure_after(after ? *after : unused);
  alignas(64) T wide[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int m = int(smaller(n - i, kChunk));
    const T* from = widened(x + i, m, wide);
    T* to = wide;
    if constexpr (kDirect<C>) to = y && !streams ? y + i : wide;
    if (before) measure_before.chunk(from, m, kDirect<C>);
    run(from, to, m, constants, &random);
    if (after) measure_after.chunk(to, m, false);
    if (codes && fits_codes(to, m, *code_spec))
      codes_of(to, codes + i, m, *code_spec);
    else
      codes = nullptr;
    if (!y) continue;
    if constexpr (!kDirect<C>)
      narrow(wide, m, y + i);
    else if (streams)
      stream(wide, m * int64_t(sizeof(C)), y + i, reinterpret_cast<const char*>(x + i + m));
  }
  if (streams) hwy::FlushStream();
  if (before) measure_before.finish();
  if (after) measure_after.finish();
  return codes != nullptr;
}

template <class C>
void round_all(const void* x, void* y, int64_t n, const RoundingSpec& spec, uint64_t seed, int64_t first_block,
               Partial* before, Partial* after) {
  round_pass<C>(x, y, n, spec, seed, first_block, before, after, nullptr, nullptr);
}

template <class C>
bool round_and_pack_all(const void* x, void* y, uint8_t* codes, int64_t n, const RoundingSpec& spec,
                        const CodeSpec& code_spec, uint64_t seed, int64_t first_block) {
  return round_pass<C>(x, y, n, spec, seed, first_block, nullptr, nullptr, codes, &code_spec);
}

template <class C>
void measure_all(const void* x_void, int64_t n, Partial& p) {
  using T = typename ComputeOf<C>::type;
  const C* x = static_cast<const C*>(x_void);
  Measurer<T> measurer(p);
  alignas(64) T wide[kDirect<C> ? 1 : kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int m = int(smaller(n - i, kChunk));
    measurer.chunk(widened(x + i, m, wide), m, kDirect<C>);
  }
  measurer.finish();
}

template <class Word>
void keep_all(void* y_void, int64_t n, const void* value, uint32_t last, uint64_t seed, int64_t first_block) {
  Word* y = static_cast<Word*>(y_void);
  const Word kept = *static_cast<const Word*>(value);
  Random random(seed, uint64_t(first_block) * (kRandomBlock / kRandomGroup));
  for (int64_t i = 0; i < n; i += kRandomGroup) {
    const uint32_t* words = random.next_group();
    const int m = int(smaller(n - i, kRandomGroup));
    for (int j = 0; j < m; ++j) y[i + j] = words[j] <= last ? kept : Word(0);
  }
}

// In the operations of LibTorch's layer_norm, one for one: its vectors end in a fused multiplication and addition where
// the CPU has them.
inline void normalize_rows(const float* x, float* y, int64_t rows, int64_t n, const float* mean, const float* rstd,
                           const float* weight, const float* bias) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    const float shift = -mean[r], scale = rstd[r];
    for (int64_t i = 0; i < n; ++i) {
      const float normal = (x[i] + shift) * scale;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
      y[i] = __builtin_fmaf(normal, weight[i], bias[i]);
#else
      y[i] = normal * weight[i] + bias[i];
#endif
    }
  }
}

constexpr KernelTable make_table(const char* level) {
  return {level,
          {round_all<float>, round_all<double>, round_all<Half>, round_all<BHalf>},
          {measure_all<float>, measure_all<double>, measure_all<Half>, measure_all<BHalf>},
          {round_blocks_all<float>, round_blocks_all<double>, round_blocks_all<Half>, round_blocks_all<BHalf>},
          {largest_all<float>, largest_all<double>, largest_all<Half>, largest_all<BHalf>},
          {pack_all<float>, pack_all<double>, pack_all<Half>, pack_all<BHalf>},
          {round_and_pack_all<float>, round_and_pack_all<double>, round_and_pack_all<Half>, round_and_pack_all<BHalf>},
          {unpack_all<float>, unpack_all<double>, unpack_all<Half>, unpack_all<BHalf>},
          {decode_all<uint32_t>, decode_all<uint64_t>, decode_all<uint16_t>, decode_all<uint16_t>},
          {keep_all<uint32_t>, keep_all<uint64_t>, keep_all<uint16_t>, keep_all<uint16_t>},
          normalize_rows,
          {hash_all<uint8_t>, hash_all<uint16_t>, hash_all<uint32_t>}};
}

}  // namespace
}  // namespace plumb::kernel
