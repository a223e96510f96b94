// The steps of pointwise programs, on float: what torch's operators do on a GPU, whose formulas these are
// (aten/src/ATen/native/cuda). Results of narrower types are rounded after each step, as there.
#pragma once

#ifndef __CUDACC_RTC__
#include <cmath>
#endif

#include "plumb/cuda/device.cuh"

namespace plumb::cuda_kernel {
namespace {

constexpr int kMostTensors = 64;  // largest number in a program; their arguments must fit a kernel's arguments

struct PointwiseArguments {
  int64_t n;
  const void* in[kMostTensors];
  void* out[kMostTensors];
};

template <class C, int N>
inline Pack<C, N> load_pack(const void* from, int64_t at, int64_t n) {
  const C* x = static_cast<const C*>(from);
  if (at + N <= n) return *reinterpret_cast<const Pack<C, N>*>(x + at);
  Pack<C, N> pack{};
  for (int j = 0; j < N; ++j)
    if (at + j < n) pack.v[j] = x[at + j];
  return pack;
}
template <class C, int N>
inline void store_pack(void* to, int64_t at, int64_t n, const Pack<C, N>& pack) {
  C* y = static_cast<C*>(to);
  if (at + N <= n) {
    *reinterpret_cast<Pack<C, N>*>(y + at) = pack;
    return;
  }
  for (int j = 0; j < N; ++j)
    if (at + j < n) y[at + j] = pack.v[j];
}

// As a tensor of C keeps it.
template <class C>
inline float kept_as(float value) {
  return value_of(narrow_to(C{}, value));
}

#ifdef __CUDACC_RTC__
inline float normal_cdf(float x) { return normcdff(x); }
#else
inline float normal_cdf(float x) { return 0.5f * erfcf(-0.70710678118654752440f * x); }
#endif

constexpr float kTwoOverRootPi = 1.12837916709551257390f, kRootHalf = 0.70710678118654752440f;
constexpr float kBeta = kTwoOverRootPi * kRootHalf, kKappa = 0.044715f;  // constants of gelu's tanh form

inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float div(float a, float b) { return a / b; }
inline float div_number(float a, float b) { return a * (1.0f / b); }  // as torch divides by a number on a GPU
inline float neg(float a) { return -a; }
inline float relu(float a) { return a != a ? a : a > 0 ? a : 0.0f; }
inline float sigmoid(float a) { return 1.0f / (1.0f + expf(-a)); }
inline float silu(float a) { return a / (1.0f + expf(-a)); }
inline float gelu(float a) { return a * normal_cdf(a); }
inline float gelu_tanh(float a) { return 0.5f * a * (1.0f + tanhf(kBeta * (a + kKappa * (a * a * a)))); }

// Gradients: g is the result's, y the result, a the argument.
inline float relu_gradient(float g, float y) { return y <= 0 ? 0.0f : g; }
inline float sigmoid_gradient(float g, float y) { return g * (1.0f - y) * y; }
inline float tanh_gradient(float g, float y) { return g * (1.0f - y * y); }
inline float silu_gradient(float g, float a) {
  const float s = 1.0f / (1.0f + expf(-a));
  return g * s * (1.0f + a * (1.0f - s));
}
inline float gelu_gradient(float g, float a) {
  const float pdf = expf(-0.5f * a * a) * (kTwoOverRootPi * kRootHalf * 0.5f);
  return g * (normal_cdf(a) + a * pdf);
}
inline float gelu_tanh_gradient(float g, float a) {
  const float square = a * a, t = tanhf(kBeta * (a + kKappa * (square * a)));
  const float of_left = 0.5f * (1.0f + t),
              of_right = 0.5f * a * (1.0f - t * t) * (kBeta * (1.0f + 3.0f * kKappa * square));
  return g * (of_left + of_right);
}

}  // namespace
}  // namespace plumb::cuda_kernel
