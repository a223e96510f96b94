// For operators elsewhere whose results may be computed again.
#pragma once

#include <torch/library.h>

namespace plumb {

// The kernel for the key TESTING_ONLY_GenericWrapper of an operator that is deterministic, without state, in time like
// reading its arguments, and returns what it makes of them first: a CheapRecompute then takes its results.
torch::CppFunction cheap_to_recompute();

}  // namespace plumb
