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

#include <torch/library.h>

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace plumb {

// The Autograd kernel of X. Refuses forward-mode tangents; an X_backward missing or misnamed is an Internal error.
// is_identity: whether X, called with these arguments, gives its first argument unchanged. An ordinary tensor is then
// returned as a view, without a copy or memory for its gradient.
using IsIdentity = bool (*)(at::ArrayRef<c10::IValue> arguments);
torch::CppFunction differentiable(IsIdentity is_identity = nullptr);

// The Autograd kernel of X_backward. When a gradient of the gradient is asked for, its kernel runs with autograd
// watching; it must then be made of differentiable operators (see recording()).
torch::CppFunction differentiable_backward();

// Whether autograd watches operators that are called on this tensor now. Kernels that write into their own results must
// not then.
bool recording(const at::Tensor& tensor);

// Gives an operator a kernel, with its name as in the schema.
template <class Kernel>
void implement(torch::Library& library, const std::string& schema, c10::DispatchKey key, Kernel&& kernel) {
  library.impl(schema.substr(0, schema.find('(')).c_str(), torch::dispatch(key, std::forward<Kernel>(kernel)));
}

// Declares an operator, with a kernel that is made of other operators and needs no more.
template <class Kernel>
void define_composite(torch::Library& library, const std::string& schema, Kernel kernel) {
  library.def(torch::schema(schema.c_str()));
  implement(library, schema, c10::DispatchKey::CompositeImplicitAutograd, kernel);
}

// Declares an operator, with one kernel for all devices and, where they are given, those for the meta device and for
// autograd.
template <class Kernel, class Meta = std::nullptr_t, class Autograd = std::nullptr_t>
void define(torch::Library& library, const std::string& schema, const std::vector<at::Tag>& tags, Kernel kernel,
            Meta meta = nullptr, Autograd&& autograd = nullptr) {
  library.def(torch::schema(schema.c_str()), tags);
  implement(library, schema, c10::DispatchKey::CompositeExplicitAutograd, kernel);
  if constexpr (!std::is_same_v<Meta, std::nullptr_t>) implement(library, schema, c10::DispatchKey::Meta, meta);
  if constexpr (!std::is_same_v<std::decay_t<Autograd>, std::nullptr_t>)
    implement(library, schema, c10::DispatchKey::Autograd, std::forward<Autograd>(autograd));
}
template <class Kernel, class... Others>
  requires(!std::is_convertible_v<Kernel, const std::vector<at::Tag>&>)
void define(torch::Library& library, const std::string& schema, Kernel kernel, Others&&... others) {
  define(library, schema, std::vector<at::Tag>{}, kernel, std::forward<Others>(others)...);
}

// t * s: in place where t is a fresh result nobody else holds and autograd does not watch.
at::Tensor scaled(at::Tensor fresh, double s);

}  // namespace plumb
