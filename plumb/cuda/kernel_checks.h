// Each kernel's call again on hard values, beside the CPU's kernel: for self_check.h. "", or the first difference.
#pragma once

#include <string>

#include "plumb/numerics/device_kernels.h"
#include "plumb/pointwise/parts.h"

namespace plumb::cuda {

// Whether the operands of the call are aligned decides which kernel it takes: `aligned` as the call to be checked.
std::string check_pass(const DeviceKernels& kernels, const PassTask& task, bool aligned);
std::string check_decode(const DeviceKernels& kernels, const at::Tensor& values, const std::array<float, 256>& table,
                         bool aligned);
std::string check_round_blocks(const DeviceKernels& kernels, const BlocksTask& task, bool aligned);
std::string check_keep(const DeviceKernels& kernels, const at::Tensor& values, bool aligned);
std::string check_hash(const DeviceKernels& kernels, const at::Tensor& x);

// Within the last places in which exp, erf and tanh of devices differ.
std::string check_pointwise_forward(const pointwise_parts::PointwiseKernels& kernels, const PointwiseProgram& program,
                                    const at::Tensor& like, const pointwise_parts::Tensors& kept, bool aligned);
std::string check_pointwise_backward(const pointwise_parts::PointwiseKernels& kernels, const PointwiseProgram& program,
                                     const PointwiseNeeds& needs, const at::Tensor& like,
                                     const pointwise_parts::Tensors& results, bool aligned);

}  // namespace plumb::cuda
