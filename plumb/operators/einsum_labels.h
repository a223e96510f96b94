// The equation of an einsum, taken apart.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// Labels of dimensions, in their order: a letter, or ".2" for the last but one of those under an ellipsis.
struct EinsumLabels {
  std::vector<std::vector<std::string>> operands;
  std::vector<std::string> result;
};

// Parses "bij,bjk->bik" for operands with these numbers of dimensions. Without an arrow the result has what torch gives
// it: the dimensions under ellipses, then the letters that stand once. Operands without a term have no labels. Checks
// nothing: a wrong equation never becomes an operator's call.
EinsumLabels einsum_labels(std::string_view equation, std::span<const size_t> dims);

}  // namespace plumb
