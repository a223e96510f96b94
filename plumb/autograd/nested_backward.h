// stage_backward for outputs that are nested, as a model returns them.
#pragma once

#include <ATen/core/ivalue.h>

#include "plumb/autograd/stage_backward.h"

namespace plumb {

// outputs: tuples, lists and dicts of tensors; values that are no tensors are skipped.
// output_grads: the same structure with None where there is no gradient, or None for ones everywhere.
// The rest is as for stage_backward. Raises Error(StructureMismatch) if the two structures differ.
Tensors stage_backward_nested(const c10::IValue& outputs, const c10::IValue& output_grads, const Tensors& inputs);

}  // namespace plumb
