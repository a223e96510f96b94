// Calls of plumb's operators through torch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// The name of an operator of plumb's, with its overload if it has one: "conv2d.padding".
template <size_t N>
struct OperatorName {
  char text[N];
  constexpr OperatorName(const char (&from)[N]) { std::copy_n(from, N, text); }  // NOLINT
};

// How the dispatcher's functions take an argument.
template <class T>
struct Taken {
  using type = T;
};
template <>
struct Taken<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct Taken<std::optional<at::Tensor>> {
  using type = const std::optional<at::Tensor>&;
};
template <>
struct Taken<at::Scalar> {
  using type = const at::Scalar&;
};
template <>
struct Taken<std::string> {
  using type = std::string_view;
};
template <>
struct Taken<std::vector<int64_t>> {
  using type = at::IntArrayRef;
};
template <size_t N>
struct Taken<std::array<double, N>> {
  using type = at::ArrayRef<double>;
};

template <class Signature>
c10::TypedOperatorHandle<Signature> find_plumb_operator(std::string_view name) {
  const size_t dot = std::min(name.find('.'), name.size());
  const std::string base = "plumb::" + std::string(name.substr(0, dot));
  const std::string overload(dot < name.size() ? name.substr(dot + 1) : "");
  return c10::Dispatcher::singleton().findSchemaOrThrow(base.c_str(), overload.c_str()).typed<Signature>();
}

// Calls plumb::NAME with all of its arguments, in order, whose types are the kernels'. It is looked up once.
template <OperatorName name, class Result = at::Tensor, class... Args>
Result call_operator(const Args&... args) {
  static const auto op = find_plumb_operator<Result(typename Taken<Args>::type...)>(name.text);
  return op.call(args...);
}

}  // namespace plumb
