#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "plumb/autograd/recompute/recompute_recipe.h"
#include "plumb/numerics/kernels.h"

namespace plumb {
namespace {

bool dense_floats(const at::Tensor& t) {
  return t.defined() && t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous();
}

at::Tensor normalize(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& mean,
                     const at::Tensor& rstd) {
  // Not as x: dimensions of size 1 may have any strides there, ATen gives its result the usual ones.
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const int64_t n = weight.numel(), rows = x.numel() / n;
  float* to = y.mutable_data_ptr<float>();
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>(), *b = bias.const_data_ptr<float>(),
              *m = mean.const_data_ptr<float>(), *s = rstd.const_data_ptr<float>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    kernel::kernels().normalize(from + begin * n, to + begin * n, end - begin, n, m + begin, s + begin, w, b);
  });
  return y;
}

// Both choose their instructions by the CPU and by settings of their own, so they are asked, once.
bool gives_the_bits_of_aten() {
  static const bool same = [] {
    for (int64_t n : {3, 64, 257}) {
      const at::Tensor x = at::arange(31 * n, at::kFloat).mul(0.7).sin().mul(3).view({31, n});
      const at::Tensor weight = at::arange(n, at::kFloat).cos(), bias = at::arange(n, at::kFloat).mul(1.3).sin();
      const auto [y, mean, rstd] = at::native_layer_norm(x, {n}, weight, bias, 1e-5);
      if (!at::equal(y, normalize(x, weight, bias, mean, rstd))) return false;
    }
    return true;
  }();
  return same;
}

}  // namespace

at::Tensor normalize_again(const std::vector<c10::IValue>& args, const at::Tensor& mean, const at::Tensor& rstd) {
  // input, normalized_shape, weight, bias, eps
  if (!args[2].isTensor() || !args[3].isTensor()) return {};
  const at::Tensor &x = args[0].toTensor(), &weight = args[2].toTensor(), &bias = args[3].toTensor();
  for (const at::Tensor* t : {&x, &weight, &bias, &mean, &rstd}) {
    if (!dense_floats(*t)) return {};
  }
  if (x.numel() == 0 || !gives_the_bits_of_aten()) return {};
  return normalize(x, weight, bias, mean, rstd);
}

}  // namespace plumb
