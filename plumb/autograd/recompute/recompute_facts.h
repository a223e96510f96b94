// Which operators a backward may compute again instead of keeping their results. They have kernels for kRecomputeKey
// (recompute.h).
#pragma once

#include <torch/library.h>

#include <string_view>
#include <vector>

namespace plumb {

struct RecomputeFacts {
  std::string_view space;  // "aten"
  std::string_view names;  // with overloads, apart by spaces
  // Their first result may be computed again: they are deterministic, have no state, and take about the time of reading
  // their arguments. Else they are operators whose nodes may save arguments, which can do without those that are.
  bool cheap;
};

// Declares these operators so, in a `TORCH_LIBRARY_IMPL(space, PLUMB_RECOMPUTE_KEY, m)` of the room that they are of.
void compute_again(torch::Library& library, const RecomputeFacts& facts);

// Returns what was declared, for tests.
const std::vector<RecomputeFacts>& recompute_facts();

}  // namespace plumb
