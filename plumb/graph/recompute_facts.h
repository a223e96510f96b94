// Which operators a backward may compute again instead of keeping their results: facts of the table of operators
// (operator_table.cpp) that autograd's recomputation alone asks for. They have kernels for kRecomputeKey (recompute.h).
#pragma once

#include <span>
#include <string_view>

namespace plumb {

struct RecomputeFacts {
  std::string_view space;  // "aten"
  std::string_view names;  // with overloads, apart by spaces
  // Their first result may be computed again: they are deterministic, have no state, and take about the time of reading
  // their arguments. Else they are operators whose nodes may save arguments, which can do without those that are.
  bool cheap;
};
std::span<const RecomputeFacts> recompute_facts();

}  // namespace plumb
