// Autograd for an operator, read off two schemas.
//
// An operator plumb::X whose Autograd kernel is differentiable() needs, in the same library:
//   X_backward   its gradient, as an operator of its own (opaque to tracing, like X itself);
//   native_X     only if the gradient needs more of the forward than its result: X's arguments, X's result first, then
//                the rest, by name.
// X_backward's arguments say, by their names, what is saved:
//   grad            the gradient of X's result
//   <argument>      X's argument of that name
//   <argument>_size the sizes of X's tensor argument of that name (the tensor itself is not kept)
//   <return>        X's (or native_X's) return of that name
//   mask            bool[n]: which of X_backward's returns are wanted
// Its returns are named grad_<argument>: one for each argument of X that has a gradient. A return not wanted is
// undefined.
#pragma once

#include <string>

#include "plumb/numerics/define_operator.h"

namespace plumb {

// The Autograd kernel of X. Refuses forward-mode tangents; an X_backward missing or misnamed is an Internal error.
// is_identity: whether X, called with these arguments, gives its first argument unchanged. An ordinary tensor is then
// returned as a view, without a copy or memory for its gradient.
using IsIdentity = bool (*)(at::ArrayRef<c10::IValue> arguments);
torch::CppFunction differentiable(IsIdentity is_identity = nullptr);

// Returns the Autograd kernel of X_backward. When a gradient of the gradient is asked for, its kernel runs with
// autograd watching; it must then be made of differentiable operators (see recording()).
torch::CppFunction differentiable_backward();

// The Meta kernel of X_backward, read off its schema. The gradient of an argument is laid out as that is
// (kAsArgument), or in C order (kInOrder); where X_backward has only its codes or its size, it is a tensor like `grad`
// of these sizes. That of a bias that X_backward does not take has the last size of `grad`, any other is like what was
// saved first, which is a result of X.
enum class GradientLayout { kAsArgument, kInOrder };
template <GradientLayout layout>
void gradient_sizes(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Returns whether autograd watches operators that are called on this tensor now. Kernels that write into their own
// results must not then.
bool recording(const at::Tensor& tensor);

// Throws Error(Unsupported) where autograd watches the gradient of `op`. instead: what has a gradient of a gradient.
void refuse_second_gradient(const char* op, const at::Tensor& grad, const char* instead = "a plain linear layer");

// Declares X_backward.
template <GradientLayout layout = GradientLayout::kAsArgument, class Kernel>
void define_backward(torch::Library& library, const std::string& schema, Kernel kernel) {
  define(library, schema, kernel, nullptr, differentiable_backward());
  implement(library, schema, c10::DispatchKey::Meta,
            torch::CppFunction::makeFromBoxedFunction<&gradient_sizes<layout>>());
}

// Returns t * s: in place if t is a fresh result with no other owner and autograd does not watch.
at::Tensor scaled(at::Tensor fresh, double s);

}  // namespace plumb
