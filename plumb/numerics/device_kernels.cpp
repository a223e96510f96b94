#include "plumb/numerics/device_kernels.h"

#include <atomic>

namespace plumb {
namespace {

auto& registered_kernels() {
  static std::array<std::atomic<const DeviceKernels*>, at::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};
  return kernels;
}

}  // namespace

void register_device_kernels(at::DeviceType kind, const DeviceKernels* kernels) {
  registered_kernels()[size_t(kind)] = kernels;
}

const DeviceKernels* device_kernels(const at::Tensor& x, at::ScalarType values) {
  const bool known = values == at::kFloat || values == at::kHalf || values == at::kBFloat16;
  return known && x.numel() > 0 ? registered_kernels()[size_t(x.device().type())].load() : nullptr;
}

}  // namespace plumb
