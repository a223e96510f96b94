// Derivatives that plumb's own operators have not: forward-mode tangents, and those that torch.func takes.
#pragma once

#include <ATen/FuncTorchTLS.h>
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

// Throws Error(Unsupported) for derivatives that no torch::autograd::Function of C++ has: tangents, and torch.func's.
inline void require_plain_autograd(std::string_view op, const at::Tensor& x) {
  refuse_tangent(op, x);
  if (const auto& layers = at::functorch::functorchTLSAccessor()) {
    try {
      layers->checkSupportsCppAutogradFunction();
    } catch (const c10::Error&) {
      throw Error(ErrorKind::Unsupported, std::string(op) + " has no derivative by torch.func (grad, vjp, jacrev).", "",
                  "torch.autograd.grad, or torch.autograd.functional.jacobian");
    }
  }
}

}  // namespace plumb
