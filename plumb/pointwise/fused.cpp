#include "plumb/pointwise/fused.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "plumb/pointwise/parts.h"

namespace plumb {
namespace {

auto& kernels_by_device() {
  static std::array<std::atomic<const pointwise_parts::PointwiseKernels*>, at::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};
  return kernels;
}

bool fits_one_kernel(const at::Tensor& like, at::TensorList tensors) {
  const bool wide = like.scalar_type() == at::kFloat || like.scalar_type() == at::kDouble;
  return (fuses_pointwise(like) || (like.is_cpu() && wide)) &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
           return pointwise_parts::blockable(t) && t.sizes() == like.sizes() && t.scalar_type() == like.scalar_type() &&
                  t.device() == like.device();
         });
}

}  // namespace

void pointwise_parts::register_pointwise_kernels(at::DeviceType kind, const PointwiseKernels* kernels) {
  kernels_by_device()[size_t(kind)] = kernels;
}

const pointwise_parts::PointwiseKernels* pointwise_parts::pointwise_kernels_for(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  const bool known = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  return known && x.numel() > 0 ? kernels_by_device()[size_t(x.device().type())].load() : nullptr;
}

bool fuses_pointwise(const at::Tensor& x) { return pointwise_parts::pointwise_kernels_for(x) != nullptr; }

at::Tensor fused_pointwise(const PointwiseProgram& program, at::TensorList inputs) {
  if (!fits_one_kernel(inputs[0], inputs)) return {};
  return pointwise_parts::run_in_blocks(program, inputs, std::vector<at::Tensor>(program.steps.size()));
}

std::vector<at::Tensor> fused_pointwise_backward(const PointwiseProgram& program, const at::Tensor& gradient,
                                                 at::TensorList inputs, const std::vector<bool>& wanted) {
  if (!fits_one_kernel(gradient, gradient) || !fits_one_kernel(gradient, inputs))
    return std::vector<at::Tensor>(inputs.size());
  return pointwise_parts::backward_in_blocks(program, pointwise_needs(program, wanted), gradient, inputs.vec(),
                                             std::vector<at::Tensor>(program.steps.size()), wanted);
}

PointwiseProgram scaled_step(PointwiseKind kind, double before, double after, double back) {
  using Arg = PointwiseArg;
  PointwiseProgram program;
  program.num_inputs = 1;
  program.steps.push_back({PointwiseKind::Scale, {Arg::Input, 0}, {}, before, back});
  program.steps.push_back({kind, {Arg::Step, 0}, {}});
  program.steps.push_back({PointwiseKind::Scale, {Arg::Step, 1}, {}, after, 1});
  return program;
}

}  // namespace plumb
