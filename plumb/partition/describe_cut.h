// The cost of a cut graph's stages, however it was cut.
#pragma once

#include "plumb/partition/balance.h"
#include "plumb/partition/pipe.h"

namespace plumb {

// Returns one entry a stage, from its shapes (estimate_cost), with what crosses its boundaries and the memory it needs,
// as balance() counts them; `options` gives the rates. Throws Error(InvalidArgument) if a graph has no shapes.
Balance describe_cut(const Pipe& pipe, const BalanceOptions& options = {});

}  // namespace plumb
