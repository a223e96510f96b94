// A pointwise program (plumb/pointwise) as a kernel: all of its steps in one pass over memory.
#pragma once

#include <string>
#include <vector>

#include "plumb/numerics/kernels.h"
#include "plumb/pointwise/pointwise.h"

namespace plumb::cuda {

// `keep`: steps whose results are written as well, after the program's result, in order. Tensors are
// PointwiseArguments' in and out.
std::string forward_text(const PointwiseProgram& program, const std::vector<bool>& keep, kernel::Carrier carrier,
                         int pack);

// in: the gradient of the result, then the inputs and the kept steps that `needs` names, in order. out: gradients of
// the inputs that are `wanted`, in order.
std::string backward_text(const PointwiseProgram& program, const PointwiseNeeds& needs, const std::vector<bool>& wanted,
                          kernel::Carrier carrier, int pack);

}  // namespace plumb::cuda
