// The types of an operator's results, asked of torch on the meta device.
#pragma once

#include <optional>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb::pt2 {

// Returns one entry a flattened tensor result (nothing for an undefined one); empty if torch cannot be asked: an input
// has no known type, an argument is a size known only when it runs, or the operator has no meta kernel.
std::vector<std::optional<TensorMeta>> infer_types(const c10::OperatorHandle& op, const std::vector<Arg>& args);

}  // namespace plumb::pt2
