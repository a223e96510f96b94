// Sums of metrics, by threads: moments in double, shifted by a thread's first value so that a large mean
// costs no digits; merged by halves in a fixed order.
#pragma once

#include "plumb/cuda/device.cuh"

namespace plumb::cuda_kernel {
namespace {

// Partial without initializers, which shared memory may not have, and without its histogram.
struct Gathered {
  double count, mean, m2, sum_abs, abs_max, abs_min;
  int64_t nans, positive_infinities, negative_infinities, zeros;
};

inline Partial to_partial(const Gathered& g) {
  Partial p;
  p.count = g.count, p.mean = g.mean, p.m2 = g.m2, p.sum_abs = g.sum_abs, p.abs_max = g.abs_max, p.abs_min = g.abs_min;
  p.nans = g.nans, p.positive_infinities = g.positive_infinities, p.negative_infinities = g.negative_infinities;
  p.zeros = g.zeros;
  return p;
}
inline Gathered to_gathered(const Partial& p) {
  return {p.count, p.mean, p.m2, p.sum_abs, p.abs_max, p.abs_min, p.nans, p.positive_infinities, p.negative_infinities,
          p.zeros};
}

struct Sums {
  double shift = 0, sum = 0, square = 0, absolute = 0;
  uint32_t count = 0, nans = 0, positive = 0, negative = 0, zeros = 0;
  uint32_t largest = 0, least = FloatTraits<float>::exponent;  // magnitudes as bits

  inline void take(float value) {
    using F = FloatTraits<float>;
    const uint32_t bits = to_bits(value), magnitude = bits & ~F::sign;
    if (magnitude >= F::exponent) {
      nans += magnitude > F::exponent;
      positive += bits == F::exponent;
      negative += bits == (F::exponent | F::sign);
      return;
    }
    const double v = value;
    if (count == 0) shift = v;
    const double apart = v - shift;
    sum += apart;
    square += apart * apart;
    absolute += double(from_bits(magnitude));
    largest = magnitude > largest ? magnitude : largest;
    least = magnitude < least ? magnitude : least;
    zeros += magnitude == 0;
    ++count;
  }

  inline Gathered gathered() const {
    Partial p;
    p.count = count;
    if (count != 0) {
      const double n = count;
      p.mean = shift + sum / n, p.m2 = square - sum * sum / n;
      p.m2 = p.m2 > 0 ? p.m2 : 0;
      p.sum_abs = absolute;
      p.abs_max = from_bits(largest), p.abs_min = from_bits(least);
    }
    p.nans = nans, p.positive_infinities = positive, p.negative_infinities = negative, p.zeros = zeros;
    return to_gathered(p);
  }
};

// A block's exponents, in copies so that neighboring threads seldom meet: values cluster in few bins.
constexpr int kCopies = 8;
inline void count_exponent(uint32_t* counts, int t, float value) {
  add_atomically(counts + (to_bits(value) >> 23 & 0xff) * kCopies + t % kCopies, 1u);
}

inline void merge_at(Gathered* parts, int into, int from) {
  Partial p = to_partial(parts[into]);
  merge(p, to_partial(parts[from]));
  parts[into] = to_gathered(p);
}

// The threads' parts as one, in parts[0].
inline void merge_threads(Gathered* parts) {
  for (int half = kThreads / 2; half > 0; half /= 2) PLUMB_PHASE(t) {
      if (t < half) merge_at(parts, t, t + half);
    }
}

// The blocks' parts as one, by one block: fields as aten_kernels.h has them (10, then the histogram's bins where there
// are counts) and, where asked for, those of plumb::tensor_metrics.
inline void finish_metrics(const Gathered* blocks, int64_t count, const uint64_t* counts, int64_t numel,
                           double* gathered, double* metrics) {
  PLUMB_SHARED Gathered parts[kThreads];
  PLUMB_PHASE(t) {
    Partial mine;
    for (int64_t b = t; b < count; b += kThreads) merge(mine, to_partial(blocks[b]));
    parts[t] = to_gathered(mine);
  }
  merge_threads(parts);
  PLUMB_PHASE(t) {
    const Partial p = to_partial(parts[0]);
    if (t == 0 && gathered) {
      const double fields[10] = {p.count,
                                 p.mean,
                                 p.m2,
                                 p.sum_abs,
                                 p.abs_max,
                                 p.abs_min,
                                 double(p.nans),
                                 double(p.positive_infinities),
                                 double(p.negative_infinities),
                                 double(p.zeros)};
      for (int i = 0; i < 10; ++i) gathered[i] = fields[i];
    }
    if (t == 0 && metrics) {
      const Finished f = finish(p, numel);
      const double fields[9] = {
          f.mean_abs,     f.abs_mean,    f.std,          f.abs_max,
          f.abs_min,      double(numel), double(p.nans), double(p.positive_infinities + p.negative_infinities),
          double(p.zeros)};
      for (int i = 0; i < 9; ++i) metrics[i] = fields[i];
    }
    for (int bin = t; counts && bin < kHistogramBins; bin += kThreads) {
      if (gathered) gathered[10 + bin] = double(counts[bin]);
      if (metrics) metrics[9 + bin] = double(counts[bin]);
    }
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
