// Formats of the values that cross between the stages of a pipeline.
//
// A value that goes from one stage to another is rounded to `fwd`, the gradient that comes back for it to `bwd`,
// whether both stages are in one process or not. So the rounding is a part of the model, and between processes the
// codes travel, one byte each. The gradient of a value with several users is rounded on every way: from the last user
// to the one before, which adds its own, and so on to the stage that made the value.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "plumb/numerics/format.h"
#include "plumb/partition/stage_io.h"
#include "plumb/transforms/report.h"

namespace plumb {

struct WireOptions {
  WireFormats formats;
  // Patterns (*, ?) of the names of values that travel as they are, as the report names them.
  std::vector<std::string> exclude;
};

// Throws Error(InvalidArgument) for a format that has no codes of one byte each (more than 8 bits, shared scales), and
// for one that rounds stochastically, as then one process would round otherwise than several.
void check(const WireFormats& formats);

// Returns null for "" and "none": as it is. Stays valid.
const FPFormat* wire_format(const std::string& text);

// Returns whether values of this dtype are rounded on the wire.
bool has_wire_codes(at::ScalarType dtype);

// Returns `value` as it arrives: rounded to `fwd`, its gradient to `bwd`; recorded by autograd.
at::Tensor over_the_wire(const at::Tensor& value, const WireFormats& formats);

// Returns the values that cross between stages: formats, names, and sizes and bytes of one microbatch if the sizes are
// known. Its title has the sum over all values, there and back.
Report wire_report(const PipeTable& table);

}  // namespace plumb
