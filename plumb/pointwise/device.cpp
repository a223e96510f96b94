#include <array>
#include <atomic>

#include "plumb/pointwise/parts.h"

namespace plumb::pointwise_parts {
namespace {

auto& kernels_by_device() {
  static std::array<std::atomic<const PointwiseKernels*>, at::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};
  return kernels;
}

}  // namespace

void register_pointwise_kernels(at::DeviceType kind, const PointwiseKernels* kernels) {
  kernels_by_device()[size_t(kind)] = kernels;
}

const PointwiseKernels* pointwise_kernels_for(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  const bool known = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  return known && x.numel() > 0 ? kernels_by_device()[size_t(x.device().type())].load() : nullptr;
}

}  // namespace plumb::pointwise_parts
