// Which operators a backward may compute again instead of keeping their results: facts of the table of operators
// (operator_table.cpp) that autograd's recomputation alone asks for.
#pragma once

#include <c10/core/DispatchKey.h>

#include <span>
#include <string_view>

namespace plumb {

// A mode key above autograd and the composite operators that nothing else uses (captures have the one above it). Only
// these operators have kernels for it (recompute.h), all others do not notice. Included while a stage's forward is
// watched, and while a graph runs that rounds values.
inline constexpr auto kRecomputeKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct RecomputeFacts {
  std::string_view space;  // "aten"
  std::string_view names;  // with overloads, apart by spaces
  // Their first result may be computed again: they are deterministic, have no state, and take about the time of reading
  // their arguments. Else they are operators whose nodes may save arguments, which can do without those that are.
  bool cheap;
};
std::span<const RecomputeFacts> recompute_facts();

}  // namespace plumb
