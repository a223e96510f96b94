#include "plumb/cuda/rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <initializer_list>

#include "plumb/cuda/kernel_texts.h"
#include "plumb/cuda/launch.h"
#include "plumb/cuda/rows.cuh"
#include "plumb/numerics/carrier.h"

namespace plumb::cuda {
namespace {

using at::Tensor;

at::DeviceType& kind_with_rows() {
  static at::DeviceType kind = at::kCUDA;
  return kind;
}

bool known(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

// Returns how many elements a thread takes at once in kernels over rows. The rows' length must allow it, too.
int row_pack(const Tensor& x, int64_t length, std::initializer_list<const Tensor*> tensors) {
  const int n = pack_of(x, tensors);
  return length % n == 0 ? n : 1;
}

// Fixed by the number of rows, so that sums over rows are the same on every GPU.
int64_t blocks_of(int64_t rows, int64_t a_multiprocessor) { return std::min<int64_t>(rows, a_multiprocessor * 132); }

Tensor run_softmax(const Tensor& x, const Tensor& grad, double before, double after) {
  const int64_t length = x.dim() == 0 ? 1 : x.size(-1), rows = x.numel() / length;
  Tensor y = at::empty_like(x);
  const int pack = row_pack(x, length, {&x, &grad, &y});
  void* const kernel =
      loaded(x.device(), softmax_text(carrier_of(x.scalar_type(), "softmax"), pack, /*gradient=*/grad.defined()));
  if (!kernel) return {};
  cuda_kernel::SoftmaxArguments arguments{x.const_data_ptr(),
                                          grad.defined() ? grad.const_data_ptr() : nullptr,
                                          y.mutable_data_ptr(),
                                          rows,
                                          length,
                                          float(before),
                                          float(after)};
  start(x.device(), kernel, blocks_of(rows, 16), {&arguments});
  return y;
}

std::string norm_text(const Tensor& x, const Tensor& weight, int pack, bool gradient) {
  const auto carrier = carrier_of(x.scalar_type(), "rms_norm");
  return rms_norm_text(carrier, weight.defined() ? carrier_of(weight.scalar_type(), "rms_norm") : carrier, pack,
                       gradient);
}

const void* memory_of(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

}  // namespace

void use_rows_on(at::DeviceType kind) { kind_with_rows() = kind; }

bool takes_rows(const Tensor& x) {
  return x.device().type() == kind_with_rows() && x.layout() == at::kStrided && !x.is_neg() && known(x.scalar_type()) &&
         x.is_contiguous() && x.numel() > 0;
}

Tensor softmax(const Tensor& x, double before, double after) { return run_softmax(x, {}, before, after); }

Tensor softmax_gradient(const Tensor& grad, const Tensor& result, double probability, double after) {
  return run_softmax(result, grad, probability, after);
}

RmsNorm rms_norm(const Tensor& x, int64_t length, const Tensor& weight, double eps) {
  const int64_t rows = x.numel() / length;
  RmsNorm made{at::empty_like(x), at::empty({rows}, x.options().dtype(at::kFloat))};
  const int pack = row_pack(x, length, {&x, &weight, &made.result});
  void* const kernel = loaded(x.device(), norm_text(x, weight, pack, false));
  if (!kernel) return {};
  cuda_kernel::RmsNormArguments arguments{x.const_data_ptr(),
                                          nullptr,
                                          memory_of(weight),
                                          made.rstd.mutable_data_ptr<float>(),
                                          made.result.mutable_data_ptr(),
                                          nullptr,
                                          rows,
                                          length,
                                          float(eps)};
  start(x.device(), kernel, blocks_of(rows, 16), {&arguments});
  return made;
}

RmsNormGradient rms_norm_gradient(const Tensor& grad, const Tensor& x, int64_t length, const Tensor& weight,
                                  const Tensor& rstd, bool want_input, bool want_weight) {
  const int64_t rows = x.numel() / length;
  // Each block of a gradient of the weight has a row of sums.
  const int64_t blocks = blocks_of(rows, want_weight ? 2 : 16);
  Tensor input, partial;
  if (want_input) input = at::empty_like(x);
  if (want_weight) partial = at::empty({blocks, length}, x.options().dtype(at::kFloat));
  const int pack = row_pack(x, length, {&x, &grad, &weight, &input});
  void* const kernel = loaded(x.device(), norm_text(x, weight, pack, true));
  if (!kernel) return {};
  cuda_kernel::RmsNormArguments arguments{x.const_data_ptr(),
                                          grad.const_data_ptr(),
                                          memory_of(weight),
                                          const_cast<float*>(rstd.const_data_ptr<float>()),
                                          input.defined() ? input.mutable_data_ptr() : nullptr,
                                          partial.defined() ? partial.mutable_data_ptr<float>() : nullptr,
                                          rows,
                                          length,
                                          0};
  start(x.device(), kernel, blocks, {&arguments});
  return {true, input, partial.defined() ? at::sum(partial, {0}) : Tensor()};
}

}  // namespace plumb::cuda
