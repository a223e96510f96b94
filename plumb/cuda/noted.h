// The kernels that an operator asks for, noted without a GPU: for tests, and for the table of operators and devices.
#pragma once

#include <c10/core/DeviceType.h>

#include <functional>
#include <string>
#include <vector>

namespace plumb::cuda {

// Returns the texts of the kernels that operators would run on CUDA tensors, of what `call` does with tensors of
// `kind`, which is not CUDA. torch's operators do the work. One call at a time.
std::vector<std::string> noted_kernels(c10::DeviceType kind, const std::function<void()>& call);

}  // namespace plumb::cuda
