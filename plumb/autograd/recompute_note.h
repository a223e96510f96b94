// For operators elsewhere whose results may be computed again.
#pragma once

#include <torch/library.h>

namespace plumb {

// The kernel for the key TESTING_ONLY_GenericWrapper of an operator whose first result a CheapRecompute may recompute.
// The operator must be deterministic and without state, and take about the time of reading its arguments.
torch::CppFunction cheap_to_recompute();

// That of another operator, whose node may save arguments: those that can be made again it then does without.
torch::CppFunction saves_its_arguments();

}  // namespace plumb
