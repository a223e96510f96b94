// A custom autograd function in a model that is captured: one node that calls it, forward and backward.
//
//   struct Cube : torch::autograd::Function<Cube> { ... };
//   at::Tensor forward(at::Tensor x) { return plumb::apply<Cube>(x); }   // in place of Cube::apply(x)
//
// Outside of a capture it is Function::apply. Tensors are its only arguments, a tensor or a list of tensors its result.
// A graph with such a node runs, trains and is cut like any other in the process that captured it; no file can hold it.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "plumb/capture/capture.h"

namespace plumb {

// Calls what register_opaque() gave the id.
std::vector<at::Tensor> call_opaque(int64_t id, const std::vector<at::Tensor>& inputs);

template <typename Function, typename... Tensors>
  requires(std::is_convertible_v<Tensors, at::Tensor> && ...)
auto apply(const Tensors&... inputs) {
  using Result = decltype(Function::apply(at::Tensor(inputs)...));
  constexpr bool one = std::is_same_v<std::decay_t<Result>, at::Tensor>;
  static const int64_t id = register_opaque(
      [](const std::vector<at::Tensor>& in) {
        return [&]<size_t... I>(std::index_sequence<I...>) -> std::vector<at::Tensor> {
          if constexpr (one) {
            return {Function::apply(in[I]...)};
          } else {
            return Function::apply(in[I]...);
          }
        }(std::index_sequence_for<Tensors...>{});
      },
      c10::demangle(typeid(Function).name()));
  auto results = call_opaque(id, {at::Tensor(inputs)...});
  if constexpr (one) {
    return results.at(0);
  } else {
    return results;
  }
}

}  // namespace plumb
