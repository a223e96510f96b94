// Pointwise programs on CUDA tensors (plumb/pointwise/parts.h).
#include "plumb/cuda/pointwise.cuh"

#include "plumb/cuda/kernel_checks.h"
#include "plumb/cuda/kernels.h"
#include "plumb/cuda/launch.h"
#include "plumb/cuda/pointwise_text.h"
#include "plumb/cuda/self_check.h"
#include "plumb/numerics/carrier.h"

namespace plumb::cuda {
namespace {

using at::Tensor;
using pointwise_parts::Tensors;

bool run(const std::string& text, const Tensors& in, const Tensors& out, int pack,
         const std::function<std::string()>& check) {
  const Tensor& like = out[0];
  void* const kernel = loaded(like.device(), text);
  if (!kernel || !is_right(like.device(), text, check)) return false;
  cuda_kernel::PointwiseArguments arguments{};
  arguments.n = like.numel();
  for (size_t i = 0; i < in.size(); ++i) arguments.in[i] = in[i].const_data_ptr();
  for (size_t i = 0; i < out.size(); ++i) arguments.out[i] = out[i].mutable_data_ptr();
  const int64_t a_block = int64_t(kThreadsOfBlock) * pack, most = 16 * 132;
  start(like.device(), kernel, std::min((arguments.n + a_block - 1) / a_block, most), {&arguments});
  return true;
}

int pack_for(const Tensors& in, const Tensors& out) {
  for (const Tensors* side : {&in, &out})
    for (const Tensor& t : *side)
      if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return 1;
  return int(16 / out[0].element_size());
}

bool fits(const Tensors& in, const Tensors& out) {
  constexpr size_t most = cuda_kernel::kMostTensors;
  return in.size() <= most && out.size() <= most;
}

bool pointwise_forward(const PointwiseProgram& program, at::TensorList inputs, const Tensor& result,
                       const Tensors& kept) {
  const Tensors in = inputs.vec();
  Tensors out{result};
  std::vector<bool> keep;
  for (const Tensor& t : kept) {
    keep.push_back(t.defined());
    if (t.defined()) out.push_back(t);
  }
  if (!fits(in, out)) return false;
  const int pack = pack_for(in, out);
  return run(forward_text(program, keep, carrier_of(result.scalar_type(), "pointwise"), pack), in, out, pack,
             [&] { return check_pointwise_forward(pointwise_kernels(), program, result, kept, pack > 1); });
}

bool pointwise_backward(const PointwiseProgram& program, const PointwiseNeeds& needs, const Tensor& gradient,
                        const Tensors& inputs, const Tensors& steps, const Tensors& results) {
  Tensors in{gradient}, out;
  std::vector<bool> wanted;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (needs.inputs[i]) in.push_back(inputs[i]);
  for (size_t i = 0; i < steps.size(); ++i)
    if (needs.kept[i]) in.push_back(steps[i]);
  for (const Tensor& t : results) {
    wanted.push_back(t.defined());
    if (t.defined()) out.push_back(t);
  }
  if (out.empty()) return true;
  if (!fits(in, out)) return false;
  const int pack = pack_for(in, out);
  return run(
      backward_text(program, needs, wanted, carrier_of(gradient.scalar_type(), "pointwise"), pack), in, out, pack,
      [&] { return check_pointwise_backward(pointwise_kernels(), program, needs, gradient, results, pack > 1); });
}

constexpr pointwise_parts::PointwiseKernels kPointwise{pointwise_forward, pointwise_backward};
[[maybe_unused]] const bool kPointwiseRegistered =
    (pointwise_parts::register_pointwise_kernels(at::kCUDA, &kPointwise), true);

}  // namespace

const pointwise_parts::PointwiseKernels& pointwise_kernels() { return kPointwise; }

}  // namespace plumb::cuda
