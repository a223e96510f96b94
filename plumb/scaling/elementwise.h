// Unit-scaled functions of each element. A row of elementwise.cpp is all that one needs: the operator, what
// unit_scale() replaces by it and fold()'s way back follow from the row.
#pragma once

#include <ATen/ATen.h>

#include <span>
#include <string_view>

#include "plumb/scaling/rules.h"

namespace plumb {

struct ElementwiseFunction {
  std::string_view name;               // "tanh": of aten::tanh(mult * x), which plumb::tanh scales
  rules::Scales (*rule)(double mult);  // [output, grad_input] for mult > 0
  at::Tensor (*torch)(const at::Tensor&) =
      nullptr;           // the operator is torch's between factors; null: it has its own kernels
  bool divided = false;  // plumb's is aten's of mult * x, over mult
};

std::span<const ElementwiseFunction> elementwise_functions();

// Finds a row by its name without or with "plumb::". Null if there is none.
const ElementwiseFunction* try_find_elementwise(std::string_view name);
// Throws Error(UnknownName) if there is none.
const ElementwiseFunction& find_elementwise(std::string_view name);

}  // namespace plumb
