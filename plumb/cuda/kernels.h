// The kernels that this room registers for CUDA tensors.
#pragma once

#include "plumb/numerics/device_kernels.h"
#include "plumb/pointwise/parts.h"

namespace plumb::cuda {

const DeviceKernels& numerics_kernels();
const pointwise_parts::PointwiseKernels& pointwise_kernels();

}  // namespace plumb::cuda
