// Tangents of forward-mode derivatives, which plumb's own operators have not.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "plumb/core/error.h"

namespace plumb {

// Throws Error(Unsupported) for a tensor with a forward-mode tangent, which the kernels of `op` would lose.
inline void refuse_tangent(std::string_view op, const at::Tensor& x) {
  if (!x.defined() || !x._fw_grad(0).defined()) return;
  throw Error(ErrorKind::Unsupported, std::string(op) + " has no forward-mode derivative.", "",
              "reverse mode: backward() or torch.autograd.grad");
}

}  // namespace plumb
