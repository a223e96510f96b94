// One-pass statistics. Compiled once per CPU level; see kernel_base.h.
//
// A sub-block is summed in lanes, shifted by the mean so far (so that a large mean costs no digits), and merged in
// double. A sub-block whose sums are not finite, or whose squares are too small for float, is done again in double: the
// common case pays for none of that.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

// Five accumulators of this many lanes fit the registers.
#if defined(__AVX512F__)
constexpr int kSumLanes = 64;
#elif defined(__AVX2__)
constexpr int kSumLanes = 16;
#else
constexpr int kSumLanes = 8;
#endif
constexpr int kSubBlock = 64 * kSumLanes;  // short sums: 64 additions a lane
constexpr int kPrefetch = 2048;            // elements ahead: without it one stream does not fill the memory bus

// The careful way: any values, two passes in double.
template <class T>
__attribute__((noinline)) void measure_carefully(const T* x, int64_t n, Partial& p) {
  using F = FloatTraits<T>;
  double sum = 0, sum_abs = 0, count = 0;
  double largest = p.abs_max, least = p.abs_min;
  for (int64_t i = 0; i < n; ++i) {
    BitsOf<T> bits = to_bits(x[i]), magnitude = bits & ~F::sign;
    if (magnitude > F::exponent) {
      ++p.nans;
    } else if (magnitude == F::exponent) {
      ++(bits & F::sign ? p.negative_infinities : p.positive_infinities);
    } else {
      double a = from_bits(magnitude);
      sum += double(x[i]);
      sum_abs += a;
      ++count;
      largest = a > largest ? a : largest;
      least = a < least ? a : least;
      p.zeros += magnitude == 0;
    }
  }
  p.abs_max = largest;
  p.abs_min = least;
  p.sum_abs += sum_abs;
  if (count == 0) return;
  double mean = sum / count, m2 = 0;
  for (int64_t i = 0; i < n; ++i) {
    if ((to_bits(x[i]) & F::exponent) == F::exponent) continue;
    double d = double(x[i]) - mean;
    m2 += d * d;
  }
  merge_moments(p, count, mean, m2);
}

template <class T>
inline double sum_lanes(const T* lanes, int n) {
  double sum = 0;
  for (int j = 0; j < n; ++j) sum += double(lanes[j]);
  return sum;
}
#if defined(__AVX512F__)
// The same bits without waiting for each addition: where the exponents of kSumLanes floats lie within 2^21 of each
// other, double rounds none of their sums.
inline double sum_lanes(const float* lanes, int n) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  __m512i above = _mm512_setzero_si512(), below = exponent;
  __m512d sums = _mm512_setzero_pd();
  for (int j = 0; j < kSumLanes; j += 16) {
    const __m512 x = _mm512_loadu_ps(lanes + j);
    const __m512i e = _mm512_and_si512(_mm512_castps_si512(x), exponent);
    above = _mm512_max_epu32(above, e);
    below = _mm512_mask_min_epu32(below, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ), below, e);
    sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  const bool exact = _mm512_reduce_max_epu32(above) <= _mm512_reduce_min_epu32(below) + (21u << 23);
  return n == kSumLanes && exact ? _mm512_reduce_add_pd(sums) : sum_lanes<float>(lanes, n);
}
#endif

// Whether no two values have different signs; zeros have none. For sums that say it may be so.
template <class T>
inline bool of_one_sign(const T* x, int n, double sum, double sum_abs) {
  const double magnitude = sum < 0 ? -sum : sum;
  if (sum_abs - magnitude > 1e-4 * sum_abs) return false;
  int below = 0, above = 0;
  for (int i = 0; i < n; ++i) {
    below |= x[i] < 0;
    above |= x[i] > 0;
  }
  return !(below && above);
}

template <class T>
inline void measure_sub_block(const T* x, int n, T shift, bool prefetch, Partial& p) {
  constexpr int L = kSumLanes * 4 / int(sizeof(T));
  T sum[L], square[L], absolute[L];
  BitsOf<T> largest[L], least[L];  // magnitudes; infinity and NaN lie above all numbers
  for (int j = 0; j < L; ++j) {
    sum[j] = square[j] = absolute[j] = T(0);
    largest[j] = 0;
    least[j] = FloatTraits<T>::exponent;
  }
  int i = 0;
  auto take = [&](T v, int j) __attribute__((always_inline)) {
    const T d = v - shift;
    const auto magnitude = BitsOf<T>(to_bits(v) & ~FloatTraits<T>::sign);
    sum[j] += d;
    square[j] += d * d;
    absolute[j] += from_bits(magnitude);
    largest[j] = largest[j] > magnitude ? largest[j] : magnitude;
    least[j] = least[j] < magnitude ? least[j] : magnitude;
  };
  if (prefetch) {
    for (; i + L <= n; i += L) {
      for (int j = 0; j < L; j += 64 / int(sizeof(T))) __builtin_prefetch(x + i + j + kPrefetch);
      for (int j = 0; j < L; ++j) take(x[i + j], j);
    }
  } else {
    for (; i + L <= n; i += L)
      for (int j = 0; j < L; ++j) take(x[i + j], j);
  }
  int used = n < L ? n : L;
  for (int j = 0; i < n; ++i, ++j) take(x[i], j);
  double sum_all = sum_lanes(sum, used), square_all = sum_lanes(square, used), absolute_all = sum_lanes(absolute, used);
  BitsOf<T> above = 0, below = FloatTraits<T>::exponent;
  for (int j = 0; j < used; ++j) {
    above = largest[j] > above ? largest[j] : above;
    below = least[j] < below ? least[j] : below;
  }
  const T most = from_bits(above), fewest = from_bits(below);
  // For float: squares overflow beyond 1e19 and vanish below 1e-19.
  bool tiny = sizeof(T) == 4 && square_all < 1e-34 && most > 0 && most < T(1e-10);
  if (!(absolute_all < 3e38 || (sizeof(T) == 8 && absolute_all < __builtin_inf())) || !(square_all < __builtin_inf()) ||
      tiny) {
    measure_carefully(x, n, p);
    return;
  }
  if (fewest == 0) {
    int zeros = 0;
    for (int k = 0; k < n; ++k) zeros += x[k] == 0;
    p.zeros += zeros;
  }
  const double total = double(shift) * n + sum_all;
  // The shifted sum has more digits, and mean |x| is |mean| then.
  if (of_one_sign(x, n, total, absolute_all)) absolute_all = total < 0 ? -total : total;
  merge_moments(p, n, double(shift) + sum_all / n, square_all - sum_all * sum_all / n);
  p.sum_abs += absolute_all;
  if (most > p.abs_max) p.abs_max = most;
  if (fewest < p.abs_min) p.abs_min = fewest;
}

// --- the exponent histogram

struct HistogramTables {
  alignas(64) uint32_t counts[4][kHistogramBins];
  bool used = false;

  // Small tensors never need them, and clearing would cost more than measuring.
  void need() {
    if (!used) __builtin_memset(counts, 0, sizeof counts);
    used = true;
  }
};

inline void count_bytes(const uint8_t* bytes, int n, HistogramTables& tables) {
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    ++tables.counts[0][bytes[i]];
    ++tables.counts[1][bytes[i + 1]];
    ++tables.counts[2][bytes[i + 2]];
    ++tables.counts[3][bytes[i + 3]];
  }
  for (; i < n; ++i) ++tables.counts[0][bytes[i]];
}

// Bins that are counted in one pass over the exponents: their counts and constants fit the registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kManyBins = 8;
#else
constexpr int kManyBins = 4;
#endif

template <int N>
struct Constant {};

// How many of n (a multiple of 64, at most kChunk) bytes equal first, first - 1, ... `next`, where not null, is asked
// for meanwhile, a line for every 32 bytes.
template <int Bins>
inline void count_bins(const uint8_t* bytes, int n, uint8_t first, int counts[Bins], const char* next) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i equal[Bins];
  for (int b = 0; b < Bins; ++b) equal[b] = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 32) {
    const __m256i e = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    if (next) __builtin_prefetch(next + 2 * i);
    for (int b = 0; b < Bins; ++b)
      equal[b] = _mm256_sub_epi8(equal[b], _mm256_cmpeq_epi8(e, _mm256_set1_epi8(char(first - b))));
  }
  for (int b = 0; b < Bins; ++b) {
    const __m256i sums = _mm256_sad_epu8(equal[b], _mm256_setzero_si256());
    counts[b] = 0;
    for (int k = 0; k < 4; ++k) counts[b] += int(reinterpret_cast<const long long*>(&sums)[k]);
  }
#else
  (void)next;
  uint8_t equal[Bins][64] = {};
  for (int i = 0; i < n; i += 64)
    for (int b = 0; b < Bins; ++b)
      for (int j = 0; j < 64; ++j) equal[b][j] += bytes[i + j] == uint8_t(first - b);
  for (int b = 0; b < Bins; ++b) {
    int total = 0;
    for (int j = 0; j < 64; ++j) total += equal[b][j];
    counts[b] = total;
  }
#endif
}

#if defined(__AVX512BW__)
// How often each bit of 512 is set in up to 127 numbers: a counter a bit, its digits in vectors of their own.
struct BitCounters {
  __m512i digits[7] = {};

  static __m512i sum(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  static __m512i carry(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi64(a, b, c, 0xe8); }
  static __m512i add(__m512i& digit, __m512i a, __m512i b) {
    const __m512i over = carry(digit, a, b);
    digit = sum(digit, a, b);
    return over;
  }
  void add8(const __m512i x[8]) {
    __m512i fours[2];
    for (int k = 0; k < 2; ++k) {
      const __m512i a = add(digits[0], x[4 * k], x[4 * k + 1]), b = add(digits[0], x[4 * k + 2], x[4 * k + 3]);
      fours[k] = add(digits[1], a, b);
    }
    __m512i over = add(digits[2], fours[0], fours[1]);
    for (int d = 3; d < 7; ++d) {
      const __m512i both = _mm512_and_si512(digits[d], over);
      digits[d] = _mm512_xor_si512(digits[d], over);
      over = both;
    }
  }
  // Of all bytes together.
  int count(int bit) const {
    int total = 0;
    for (int d = 0; d < 7; ++d)
      total += __builtin_popcountll(_mm512_test_epi8_mask(digits[d], _mm512_set1_epi8(char(1 << bit)))) << d;
    return total;
  }
};

constexpr int kBitBins = 16;

// How many of n (a multiple of 512, at most kChunk) bytes equal top, top - 1, ...: each becomes one bit of 16.
inline void count_bits(const uint8_t* bytes, int n, uint8_t top, int counts[kBitBins], const char* next) {
  const __m512i first = _mm512_set1_epi8(char(top)), over = _mm512_set1_epi8(0x70);
  const __m512i low = _mm512_set4_epi32(0, 0, int(0x80402010), 0x08040201);
  const __m512i high = _mm512_set4_epi32(int(0x80402010), 0x08040201, 0, 0);
  BitCounters counters[2];
  for (int i = 0; i < n; i += 512) {
    __m512i a[8], b[8];
    for (int k = 0; k < 8; ++k) {
      if (next) __builtin_prefetch(next + 4 * (i + 64 * k) / 2), __builtin_prefetch(next + 4 * (i + 64 * k) / 2 + 64);
      const __m512i below = _mm512_sub_epi8(first, _mm512_loadu_si512(bytes + i + 64 * k));
      const __m512i place = _mm512_adds_epu8(below, over);  // beyond 15 its highest bit is set, and no bit is chosen
      a[k] = _mm512_shuffle_epi8(low, place);
      b[k] = _mm512_shuffle_epi8(high, place);
    }
    counters[0].add8(a);
    counters[1].add8(b);
  }
  for (int b = 0; b < kBitBins; ++b) counts[b] = counters[b / 8].count(b % 8);
}
#endif

// Tensors' exponents cluster just below the largest: those bins by comparing whole vectors, the few values left one by
// one, and by table when they are many.
inline void count_exponents(const uint8_t* exponents, int n, HistogramTables& tables, uint64_t* histogram,
                            const char* next) {
#if defined(__AVX512BW__)
  int whole = n & ~511;
#else
  int whole = n & ~63;
#endif
  if (whole < 512) {
    for (int i = 0; i < n; ++i) ++histogram[exponents[i]];
    return;
  }
  tables.need();
  count_bytes(exponents + whole, n - whole, tables);
  uint8_t top_lanes[64] = {};
  uint8_t low_lanes[64];
  for (int j = 0; j < 64; ++j) low_lanes[j] = 255;
  for (int i = 0; i < whole; i += 64)
    for (int j = 0; j < 64; ++j) {
      uint8_t e = exponents[i + j];
      top_lanes[j] = e > top_lanes[j] ? e : top_lanes[j];
      low_lanes[j] = e < low_lanes[j] ? e : low_lanes[j];
    }
  int top = 0, low = 255;
  for (int j = 0; j < 64; ++j) {
    top = top_lanes[j] > top ? top_lanes[j] : top;
    low = low_lanes[j] < low ? low_lanes[j] : low;
  }
  int left = whole;
  int floor = 0;  // bins below it are counted
  if (low == 0) {
    int zeros[1];
    count_bins<1>(exponents, whole, 0, zeros, nullptr);
    histogram[0] += zeros[0];
    left -= zeros[0];
    floor = 1;
  }
  int bin = top;  // bins above it are counted
  auto take = [&](const int* counts, int bins) {
    next = nullptr;
    for (int b = 0; b < bins; ++b) {
      histogram[bin - b] += counts[b];
      left -= counts[b];
    }
    bin -= bins;
  };
  auto count_next = [&]<int Bins>(Constant<Bins>) {
    int counts[Bins];
    count_bins<Bins>(exponents, whole, uint8_t(bin), counts, next);
    take(counts, Bins);
  };
#if defined(__AVX512BW__)
  if (top - low > 4 && bin - kBitBins >= floor - 1) {
    int counts[kBitBins];
    count_bits(exponents, whole, uint8_t(bin), counts, next);
    take(counts, kBitBins);
  }
#endif
  if (top - low > 4 && bin - kManyBins >= floor - 1 && bin == top) count_next(Constant<kManyBins>());
  while (left > 0 && bin - 4 >= floor - 1 && bin > top - 12) count_next(Constant<4>());
  if (left == 0) return;
#if defined(__AVX2__)
  if (left <= whole / 8) {
    const __m256i limit = _mm256_set1_epi8(char(bin)), zero = _mm256_setzero_si256();
    auto load = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponents + i)); };
    for (int i = 0; i < whole; i += 32) {
      if (floor == 0 && i % 64 == 0) {  // most often there is nothing to see
        const __m256i least = _mm256_min_epu8(load(i), load(i + 32));
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(least, limit), least)) == 0) {
          i += 32;
          continue;
        }
      }
      const __m256i e = load(i);
      uint32_t rest = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(e, limit), e)));
      if (floor == 1) rest &= ~uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(e, zero)));
      for (; rest; rest &= rest - 1) ++histogram[exponents[i + __builtin_ctz(rest)]];
    }
    return;
  }
#endif
  for (int i = 0; i < whole; i += 4)
    for (int k = 0; k < 4; ++k) {
      int e = exponents[i + k];
      tables.counts[k][e] += e <= bin && e >= floor;
    }
}

// In any order: they are only counted.
inline void exponents_of(const float* x, int n, uint8_t* exponents) {
  int i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Packing works within halves of registers; putting that right would take as long as the packing.
  const __m256i byte = _mm256_set1_epi16(0xff);
  auto load = [&](int at) {
    return _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + at)), 23);
  };
  for (; i + 32 <= n; i += 32) {
    const __m256i low = _mm256_and_si256(_mm256_packus_epi32(load(0), load(8)), byte);
    const __m256i high = _mm256_and_si256(_mm256_packus_epi32(load(16), load(24)), byte);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(exponents + i), _mm256_packus_epi16(low, high));
  }
#endif
  for (; i < n; ++i) exponents[i] = uint8_t(to_bits(x[i]) >> 23);
}
inline void exponents_of(const double* x, int n, uint8_t* exponents) {
  for (int i = 0; i < n; ++i) {
    int e = int(to_bits(x[i]) >> 52 & 0x7ff);
    int f = e - 896;  // float's bias for double's
    f = f < 0 ? 0 : f;
    f = f > 254 ? 254 : f;
    exponents[i] = uint8_t(e == 0x7ff ? 255 : f);
  }
}

// Gathers into one Partial, chunk after chunk; finish() folds the tables in.
template <class T>
struct Measurer {
  Partial& p;
  HistogramTables tables;

  explicit Measurer(Partial& partial) : p(partial) {}

  // At most kChunk values.
  void chunk(const T* x, int n, bool prefetch) {
    constexpr int step = kSubBlock * 4 / int(sizeof(T));
    double mean = p.mean;
    if (p.count == 0) {
      int few = n < 16 ? n : 16;
      mean = 0;
      for (int i = 0; i < few; ++i) mean += double(x[i]);
      mean /= few;
    }
    T shift = mean < 1e30 && mean > -1e30 ? T(mean) : T(0);
    for (int i = 0; i < n; i += step) measure_sub_block(x + i, n - i < step ? n - i : step, shift, prefetch, p);
    if (p.histogram) {
      alignas(64) uint8_t exponents[kChunk];
      exponents_of(x, n, exponents);
      // Beyond what measuring has asked for.
      count_exponents(exponents, n, tables, p.histogram,
                      prefetch ? reinterpret_cast<const char*>(x + n + kPrefetch) : nullptr);
    }
  }

  void finish() {
    if (!p.histogram || !tables.used) return;
    for (int i = 0; i < kHistogramBins; ++i)
      for (int k = 0; k < 4; ++k) p.histogram[i] += tables.counts[k][i];
  }
};

}  // namespace
}  // namespace plumb::kernel
