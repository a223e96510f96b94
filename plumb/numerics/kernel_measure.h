// One-pass statistics. Compiled once per CPU level; see kernel_base.h.
//
// A sub-block is summed in lanes, shifted by the mean so far (so that a large mean costs no digits), and merged in
// double. A sub-block whose sums are not finite, or whose squares are too small for float, is done again in double: the
// common case pays for none of that.
#pragma once

#include "plumb/numerics/kernel_base.h"

namespace plumb::kernel {
namespace {

// Lanes of which five accumulators fit the registers.
constexpr int kSumLanes = HWY_MAX_BYTES == 64 ? 64 : HWY_MAX_BYTES / 2;
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
// The same bits without waiting for each addition, for as many lanes as make that worth while: where the exponents of
// kSumLanes floats lie within 2^21 of each other, double rounds none of their sums.
inline double sum_lanes(const float* lanes, int n) {
  if (kSumLanes < 64 || n != kSumLanes) return sum_lanes<float>(lanes, n);
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  const hn::Repartition<double, decltype(d)> wide;
  const hn::Half<decltype(d)> half;
  const auto exponent = hn::Set(bits, FloatTraits<float>::exponent);
  auto above = hn::Zero(bits), below = exponent;
  auto sums = hn::Zero(wide);
  for (int j = 0; j < kSumLanes; j += int(hn::MaxLanes(d))) {
    const auto x = hn::LoadU(d, lanes + j);
    const auto e = hn::And(hn::BitCast(bits, x), exponent);
    above = hn::Max(above, e);
    below = hn::Min(below, hn::IfThenElse(hn::RebindMask(bits, hn::Ne(x, hn::Zero(d))), e, exponent));
    sums = hn::Add(sums, hn::PromoteTo(wide, hn::LowerHalf(half, x)));
    sums = hn::Add(sums, hn::PromoteTo(wide, hn::UpperHalf(half, x)));
  }
  const uint32_t most = hn::GetLane(hn::MaxOfLanes(bits, above)), least = hn::GetLane(hn::MinOfLanes(bits, below));
  return most <= least + (21u << 23) ? hn::GetLane(hn::SumOfLanes(wide, sums)) : sum_lanes<float>(lanes, n);
}

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

// Returns d^2 + sum, rounded once where an instruction does that. No compiler decides it: functions with the same
// source have the same bits.
template <class T>
inline T add_square(T d, T sum) {
#ifdef __FMA__
  if constexpr (sizeof(T) == 4) return __builtin_fmaf(d, d, sum);
  return __builtin_fma(d, d, sum);
#else
  return d * d + sum;
#endif
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
    square[j] = add_square(d, square[j]);
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

// How many of n (a multiple of 64, at most kChunk) bytes equal first, first - 1, ...
template <int Bins>
inline void count_bins(const uint8_t* bytes, int n, uint8_t first, int counts[Bins]) {
  uint8_t equal[Bins][64] = {};
  for (int i = 0; i < n; i += 64)
    for (int b = 0; b < Bins; ++b)
      for (int j = 0; j < 64; ++j) equal[b][j] += bytes[i + j] == uint8_t(first - b);
  for (int b = 0; b < Bins; ++b) {
    int total = 0;
    for (int j = 0; j < 64; ++j) total += equal[b][j];
    counts[b] = total;
  }
}

// How often each bit is set in the vectors of up to kChunk bytes: a counter a bit, its digits in vectors of their own.
struct BitCounters {
  static constexpr hn::ScalableTag<uint8_t> d{};
  static constexpr int kDigits = 1 + __builtin_ctz(kChunk / int(hn::MaxLanes(d)));
  using Bits = hn::Vec<hn::ScalableTag<uint8_t>>;
  Bits digits[kDigits];

  BitCounters() {
    for (Bits& digit : digits) digit = hn::Zero(d);
  }
  // Returns the carry.
  static Bits add(Bits& digit, Bits a, Bits b) {
    const Bits one = hn::Xor(a, b), over = hn::OrAnd(hn::And(a, b), digit, one);
    digit = hn::Xor(digit, one);
    return over;
  }
  void add8(const Bits x[8]) {
    Bits fours[2];
    for (int k = 0; k < 2; ++k) {
      const Bits a = add(digits[0], x[4 * k], x[4 * k + 1]), b = add(digits[0], x[4 * k + 2], x[4 * k + 3]);
      fours[k] = add(digits[1], a, b);
    }
    Bits over = add(digits[2], fours[0], fours[1]);
    for (int k = 3; k < kDigits; ++k) {
      const Bits both = hn::And(digits[k], over);
      digits[k] = hn::Xor(digits[k], over);
      over = both;
    }
  }
  // Returns the number of added bytes that have this bit set.
  int count(int bit) const {
    int total = 0;
    for (int k = 0; k < kDigits; ++k)
      total += int(hn::CountTrue(d, hn::TestBit(digits[k], hn::Set(d, uint8_t(1 << bit))))) << k;
    return total;
  }
};

constexpr int kBitBins = 16;

// How many of n (a multiple of 512, at most kChunk) bytes equal top, top - 1, ...: each becomes one bit of 16. `next`,
// where not null, is asked for meanwhile, a line for every 32 bytes.
inline void count_bits(const uint8_t* bytes, int n, uint8_t top, int counts[kBitBins], const char* next) {
  const hn::ScalableTag<uint8_t> d;
  constexpr int kWide = int(hn::MaxLanes(d));
  alignas(16) static constexpr uint8_t kBits[32] = {1, 2, 4, 8, 16, 32, 64, 128, 0, 0, 0, 0, 0,  0,  0,  0,
                                                    0, 0, 0, 0, 0,  0,  0,  0,   1, 2, 4, 8, 16, 32, 64, 128};
  // Places beyond 15 choose no bit. x86 looks at the highest bit of a place, else at the lowest four; ARM at all.
  const auto first = hn::Set(d, top), over = hn::Set(d, uint8_t(HWY_ARCH_X86 ? 0x70 : 0));
  const auto low = hn::LoadDup128(d, kBits), high = hn::LoadDup128(d, kBits + 16);
  BitCounters counters[2];
  for (int i = 0; i < n; i += 8 * kWide) {
    BitCounters::Bits a[8], b[8];
    for (int k = 0; k < 8; ++k) {
      const int at = i + k * kWide;
      if (next)
        for (int line = 0; line < kWide; line += 32) hwy::Prefetch(next + 2 * (at + line));
      const auto place = hn::SaturatedAdd(hn::Sub(first, hn::Load(d, bytes + at)), over);
      a[k] = hn::TableLookupBytesOr0(low, place);
      b[k] = hn::TableLookupBytesOr0(high, place);
    }
    counters[0].add8(a);
    counters[1].add8(b);
  }
  for (int b = 0; b < kBitBins; ++b) counts[b] = counters[b / 8].count(b % 8);
}

// Tensors' exponents cluster just below the largest: those bins by comparing whole vectors, the few values left one by
// one, and by table when they are many. `next` is what count_bits() asks for.
inline void count_exponents(const uint8_t* exponents, int n, HistogramTables& tables, uint64_t* histogram,
                            const char* next) {
  int whole = n & ~511;
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
    count_bins<1>(exponents, whole, 0, zeros);
    histogram[0] += zeros[0];
    left -= zeros[0];
    floor = 1;
  }
  int bin = top;  // bins above it are counted
  auto take = [&](const int* counts, int bins) {
    for (int b = 0; b < bins; ++b) {
      histogram[bin - b] += counts[b];
      left -= counts[b];
    }
    bin -= bins;
  };
  int counts[kBitBins];
  if (top - low > 4 && bin - kBitBins >= floor - 1) {
    count_bits(exponents, whole, uint8_t(bin), counts, next);
    take(counts, kBitBins);
  }
  while (left > 0 && bin - 4 >= floor - 1 && bin > top - 12) {
    count_bins<4>(exponents, whole, uint8_t(bin), counts);
    take(counts, 4);
  }
  if (left == 0) return;
  if (left <= whole / 8) {
    const hn::ScalableTag<uint8_t> d;
    const auto least = hn::Set(d, uint8_t(floor)), span = hn::Set(d, uint8_t(bin - floor));
    for (int i = 0; i < whole; i += int(hn::MaxLanes(d))) {
      const auto above = hn::Sub(hn::Load(d, exponents + i), least);
      const auto rest = hn::Eq(hn::Min(above, span), above);
      if (hn::AllFalse(d, rest)) continue;
      uint64_t places = 0;
      hn::StoreMaskBits(d, rest, reinterpret_cast<uint8_t*>(&places));
      for (; places; places &= places - 1) ++histogram[exponents[i + __builtin_ctzll(places)]];
    }
    return;
  }
  for (int i = 0; i < whole; i += 4)
    for (int k = 0; k < 4; ++k) {
      int e = exponents[i + k];
      tables.counts[k][e] += e <= bin && e >= floor;
    }
}

// In any order: they are only counted.
inline void exponents_of(const float* x, int n, uint8_t* exponents) {
  constexpr int kRun = 16;  // words of four exponents each
  int i = 0;
  for (; i + 4 * kRun <= n; i += 4 * kRun)
    for (int j = 0; j < kRun; ++j) {
      const auto bits = [&](int k) { return to_bits(x[i + k * kRun + j]); };
      const uint32_t four =
          (bits(0) >> 23 & 0xff) | (bits(1) >> 15 & 0xff00) | (bits(2) >> 7 & 0xff0000) | (bits(3) << 1 & 0xff000000);
      __builtin_memcpy(exponents + i + 4 * j, &four, 4);
    }
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
