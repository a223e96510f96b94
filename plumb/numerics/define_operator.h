// Declarations of plumb's operators, with their kernels.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace plumb {

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

// A Meta kernel that takes what `kernel` takes, of which the first argument, or the first two, say what `make` makes.
template <auto make, class Result, class First, class Second, class... Rest>
auto meta_from(Result (*)(First, Second, Rest...)) {
  return +[](First first, Second second, Rest...) -> Result {
    if constexpr (requires { make(first, second); })
      return make(first, second);
    else
      return make(first);
  };
}

// An operator's seed, in the bits that kernels take.
inline std::optional<uint64_t> as_seed(std::optional<int64_t> seed) {
  return seed ? std::optional(static_cast<uint64_t>(*seed)) : std::nullopt;
}

// An Autograd kernel of operators whose results have no history.
inline void call_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}
inline torch::CppFunction without_history() {
  return torch::CppFunction::makeFromBoxedFunction<&call_below_autograd>();
}

}  // namespace plumb
