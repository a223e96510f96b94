// Softmax and RMS norm of rows, with their gradients: a block takes one row after the other, and reads it twice, the
// second time from its cache. Sums are taken in float, by threads, and merged by halves in a fixed order. Values are
// rounded where torch's operators, one by one, would round them.
#pragma once

#include "plumb/cuda/pointwise.cuh"

namespace plumb::cuda_kernel {
namespace {

constexpr float kInfinity = float(__builtin_inf());

inline void sum_threads(float* parts) {
  for (int half = kThreads / 2; half > 0; half /= 2) PLUMB_PHASE(t) {
      if (t < half) parts[t] += parts[t + half];
    }
}

// --- y = after * softmax(before * x)

struct SoftmaxArguments {
  const void* x;  // of the gradient: the forward's result
  const void* grad;
  void* y;
  int64_t rows, length;
  float before, after;  // of the gradient: what makes probabilities of the result, and the gradient's factor
};

// A sum of exp(value - largest).
struct ExpSum {
  float largest = -kInfinity, sum = 0;

  inline void take(float value) {
    if (value > largest) {
      sum *= expf(largest - value);
      largest = value;
    }
    if (value != -kInfinity) sum += expf(value - largest);
  }
  inline void merge(float other_largest, float other_sum) {
    const float most = other_largest > largest ? other_largest : largest;
    const float mine = sum == 0 ? 0 : sum * expf(largest - most);
    sum = mine + (other_sum == 0 ? 0 : other_sum * expf(other_largest - most));
    largest = most;
  }
};

template <class C, int N>
inline void softmax(const SoftmaxArguments& a) {
  PLUMB_SHARED float largest[kThreads];
  PLUMB_SHARED float sums[kThreads];
  for (int64_t row = block_index(); row < a.rows; row += block_count()) {
    const C* x = static_cast<const C*>(a.x) + row * a.length;
    C* y = static_cast<C*>(a.y) + row * a.length;
    PLUMB_PHASE(t) {
      ExpSum mine;
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        const Pack<C, N> pack = load_pack<C, N>(x, at, a.length);
        for (int j = 0; j < N; ++j) mine.take(kept_as<C>(value_of(pack.v[j]) * a.before));
      }
      largest[t] = mine.largest, sums[t] = mine.sum;
    }
    for (int half = kThreads / 2; half > 0; half /= 2) PLUMB_PHASE(t) {
        if (t < half) {
          ExpSum both{largest[t], sums[t]};
          both.merge(largest[t + half], sums[t + half]);
          largest[t] = both.largest, sums[t] = both.sum;
        }
      }
    PLUMB_PHASE(t) {
      const float most = largest[0], sum = sums[0];
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        Pack<C, N> pack = load_pack<C, N>(x, at, a.length);
        for (int j = 0; j < N; ++j) {
          const float value = kept_as<C>(value_of(pack.v[j]) * a.before);
          pack.v[j] = narrow_to(C{}, kept_as<C>(expf(value - most) / sum) * a.after);
        }
        store_pack<C, N>(y, at, a.length, pack);
      }
    }
  }
}

template <class C, int N>
inline void softmax_gradient(const SoftmaxArguments& a) {
  PLUMB_SHARED float sums[kThreads];
  for (int64_t row = block_index(); row < a.rows; row += block_count()) {
    const C* result = static_cast<const C*>(a.x) + row * a.length;
    const C* grad = static_cast<const C*>(a.grad) + row * a.length;
    C* y = static_cast<C*>(a.y) + row * a.length;
    PLUMB_PHASE(t) {
      float mine = 0;
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        const Pack<C, N> r = load_pack<C, N>(result, at, a.length), g = load_pack<C, N>(grad, at, a.length);
        for (int j = 0; j < N; ++j) mine += kept_as<C>(value_of(r.v[j]) * a.before) * value_of(g.v[j]);
      }
      sums[t] = mine;
    }
    sum_threads(sums);
    PLUMB_PHASE(t) {
      const float sum = sums[0];
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        Pack<C, N> r = load_pack<C, N>(result, at, a.length);
        const Pack<C, N> g = load_pack<C, N>(grad, at, a.length);
        for (int j = 0; j < N; ++j) {
          const float probability = kept_as<C>(value_of(r.v[j]) * a.before);
          r.v[j] = narrow_to(C{}, kept_as<C>((value_of(g.v[j]) - sum) * probability) * a.after);
        }
        store_pack<C, N>(y, at, a.length, r);
      }
    }
  }
}

// --- y = x * rstd * weight, rstd = 1 / sqrt(mean(x * x) + eps)

struct RmsNormArguments {
  const void* x;
  const void* grad;    // of the gradient
  const void* weight;  // or null
  float* rstd;         // written by the forward, read by the gradient
  void* y;             // the result, or the input's gradient; null: not wanted
  float* partial;      // of the gradient: for each block a row of the weight's gradient; null: not wanted
  int64_t rows, length;
  float eps;
};

// C: the values' type; W: the weight's; N: neighbors that are moved together.
template <class C, class W, int N>
inline void rms_norm(const RmsNormArguments& a) {
  PLUMB_SHARED float sums[kThreads];
  for (int64_t row = block_index(); row < a.rows; row += block_count()) {
    const C* x = static_cast<const C*>(a.x) + row * a.length;
    C* y = static_cast<C*>(a.y) + row * a.length;
    PLUMB_PHASE(t) {
      float mine = 0;
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        const Pack<C, N> pack = load_pack<C, N>(x, at, a.length);
        for (int j = 0; j < N; ++j) mine += value_of(pack.v[j]) * value_of(pack.v[j]);
      }
      sums[t] = mine;
    }
    sum_threads(sums);
    PLUMB_PHASE(t) {
      const float rstd = 1.0f / sqrtf(sums[0] / float(a.length) + a.eps);
      if (t == 0) a.rstd[row] = rstd;
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        Pack<C, N> pack = load_pack<C, N>(x, at, a.length);
        Pack<W, N> weight{};
        if (a.weight) weight = load_pack<W, N>(a.weight, at, a.length);
        for (int j = 0; j < N; ++j) {
          const float normal = value_of(pack.v[j]) * rstd;
          pack.v[j] = narrow_to(C{}, a.weight ? normal * value_of(weight.v[j]) : normal);
        }
        store_pack<C, N>(y, at, a.length, pack);
      }
    }
  }
}

template <class C, class W, int N>
inline void rms_norm_gradient(const RmsNormArguments& a) {
  PLUMB_SHARED float sums[kThreads];
  float* const partial = a.partial ? a.partial + block_index() * a.length : nullptr;
  for (int64_t row = block_index(); row < a.rows; row += block_count()) {
    const C* x = static_cast<const C*>(a.x) + row * a.length;
    const C* grad = static_cast<const C*>(a.grad) + row * a.length;
    C* y = static_cast<C*>(a.y) + row * a.length;
    PLUMB_PHASE(t) {
      const float rstd = a.rstd[row];
      float mine = 0;
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        const Pack<C, N> values = load_pack<C, N>(x, at, a.length), g = load_pack<C, N>(grad, at, a.length);
        Pack<W, N> weight{};
        if (a.weight) weight = load_pack<W, N>(a.weight, at, a.length);
        for (int j = 0; j < N; ++j) {
          const float normal = value_of(values.v[j]) * rstd, of_result = value_of(g.v[j]);
          mine += (a.weight ? of_result * value_of(weight.v[j]) : of_result) * normal;
          // A column of a block is one thread's, in all rows.
          if (partial) partial[at + j] = (row == block_index() ? 0 : partial[at + j]) + of_result * normal;
        }
      }
      sums[t] = mine;
    }
    if (!a.y) continue;
    sum_threads(sums);
    PLUMB_PHASE(t) {
      const float rstd = a.rstd[row], mean = sums[0] / float(a.length);
      for (int64_t at = int64_t(t) * N; at < a.length; at += kThreads * N) {
        Pack<C, N> values = load_pack<C, N>(x, at, a.length);
        const Pack<C, N> g = load_pack<C, N>(grad, at, a.length);
        Pack<W, N> weight{};
        if (a.weight) weight = load_pack<W, N>(a.weight, at, a.length);
        for (int j = 0; j < N; ++j) {
          const float normal = value_of(values.v[j]) * rstd, of_result = value_of(g.v[j]);
          const float inner = a.weight ? of_result * value_of(weight.v[j]) : of_result;
          values.v[j] = narrow_to(C{}, (inner - normal * mean) * rstd);
        }
        store_pack<C, N>(y, at, a.length, values);
      }
    }
  }
}

}  // namespace
}  // namespace plumb::cuda_kernel
