#include "plumb/scaling/elementwise.h"

#include <cmath>
#include <string>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/rules_internal.h"

namespace plumb {
namespace {

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// From the moments of the function and of its slope over a unit normal variable.
template <auto Value, auto Slope>
rules::Scales integrated(double mult) {
  rules::require_positive("mult", mult);
  auto rule = [](double m) -> rules::Scales {
    const double mean = rules::normal_mean([m](double x) { return Value(m * x); });
    const double square = rules::normal_mean([m](double x) { return Value(m * x) * Value(m * x); });
    const double slope = rules::normal_mean([m](double x) { return m * Slope(m * x) * (m * Slope(m * x)); });
    return {1 / std::sqrt(square - mean * mean), 1 / std::sqrt(slope)};
  };
  static const rules::Scales plain = rule(1);
  return mult == 1 ? plain : rule(mult);
}

constexpr ElementwiseFunction kFunctions[] = {
    {"gelu", rules::gelu, nullptr, true},
    {"silu", rules::silu, nullptr, true},
    {"tanh",
     integrated<[](double x) { return std::tanh(x); }, [](double x) { return 1 - std::tanh(x) * std::tanh(x); }>,
     at::tanh},
    {"sigmoid", integrated<sigmoid_of, [](double x) { return sigmoid_of(x) * (1 - sigmoid_of(x)); }>, at::sigmoid},
};

// The others' rows stand beside their kernels.
[[maybe_unused]] const bool elementwise_rows = [] {
  for (const ElementwiseFunction& function : kFunctions) {
    if (function.torch) RegisterOperators{{"plumb::", function.name}};
  }
  return true;
}();

}  // namespace

std::span<const ElementwiseFunction> elementwise_functions() { return kFunctions; }

const ElementwiseFunction* try_find_elementwise(std::string_view name) {
  if (name.starts_with("plumb::")) name.remove_prefix(7);
  for (const ElementwiseFunction& function : kFunctions) {
    if (function.name == name) return &function;
  }
  return nullptr;
}

const ElementwiseFunction& find_elementwise(std::string_view name) {
  if (const ElementwiseFunction* function = try_find_elementwise(name)) return *function;
  throw Error(ErrorKind::UnknownName,
              "there is no unit-scaled function of each element named '" + std::string(name) + "'", "",
              join(kFunctions, &ElementwiseFunction::name));
}

}  // namespace plumb
