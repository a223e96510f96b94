// Autocast of the unit-scaled versions of linear, matmul, convolutions, attention and losses, as torch's own.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace plumb {
namespace {

using at::autocast::cached_cast;

template <at::DeviceType kDevice>
c10::DispatchKeySet autocast_keys() {
  return c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
}

// Casts the tensors among the arguments and goes on without autocast.
template <at::DeviceType kDevice, bool kLower>
void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_keys<kDevice>());
  const auto type = kLower ? at::autocast::get_autocast_dtype(kDevice) : at::kFloat;
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) value = cached_cast(type, value.toTensor(), kDevice);
  }
  op.callBoxed(stack);
}

template <at::DeviceType kDevice>
void implement_autocast(torch::Library& m) {
  for (const char* name :
       {"linear", "linear_readout", "matmul", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "scaled_dot_product_attention", "fp8_linear", "fp8_matmul"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_call<kDevice, true>>());
  }
  for (const char* name : {"softmax", "cross_entropy", "mse_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_call<kDevice, false>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(plumb, AutocastCPU, m) { implement_autocast<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(plumb, AutocastCUDA, m) { implement_autocast<at::kCUDA>(m); }
TORCH_LIBRARY_IMPL(plumb, AutocastXPU, m) { implement_autocast<at::kXPU>(m); }
TORCH_LIBRARY_IMPL(plumb, AutocastMPS, m) { implement_autocast<at::kMPS>(m); }
TORCH_LIBRARY_IMPL(plumb, AutocastPrivateUse1, m) { implement_autocast<at::kPrivateUse1>(m); }

}  // namespace plumb
