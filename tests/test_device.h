// The device that tests run on: PLUMB_TEST_DEVICE in the environment, or the CPU.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

namespace plumb {

class GraphModule;

// "testdevice" is tests/device/test_device.cpp, which is loaded for it. With PLUMB_TEST_BACKEND=strict its values
// travel through tests/device/strict_backend.h in groups that are made for it.
c10::Device test_device();

// The values there, as a leaf; the tensor itself where it is there already or has no values.
inline at::Tensor there(const at::Tensor& t) {
  if (!t.defined() || t.is_meta() || t.device().type() == test_device().type()) return t;
  return t.detach().to(test_device()).set_requires_grad(t.requires_grad());
}

// Returns a random tensor on the test device. Random numbers are the CPU's.
inline at::Tensor randn_there(at::IntArrayRef sizes, const at::TensorOptions& options = {}) {
  return there(at::randn(sizes, options));
}
inline at::Tensor rand_there(at::IntArrayRef sizes, const at::TensorOptions& options = {}) {
  return there(at::rand(sizes, options));
}
inline at::Tensor ones_there(at::IntArrayRef sizes, const at::TensorOptions& options = {}) {
  return there(at::ones(sizes, options));
}
inline at::Tensor zeros_there(at::IntArrayRef sizes, const at::TensorOptions& options = {}) {
  return there(at::zeros(sizes, options));
}

// Parameters and buffers of a module go there in place, as torch::nn::Module::to() moves them: it refuses devices of
// backends that are not torch's own.
void move_there(torch::nn::Module& module);
// A graph with its state, device arguments and metadata.
void move_there(GraphModule& module);

}  // namespace plumb
