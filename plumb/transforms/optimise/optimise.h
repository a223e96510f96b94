// Makes a graph faster without changing what it means.
//
//   auto fast = plumb::compile(plumb::unit_scale(module));
//
// fold: a factor (x * 3, x / 3, scale_fwd, scale_bwd, that of unit-scaled attention) before or behind a linear layer or
//   matrix product becomes part of the product, views in between or not. Factors of one chain become one; factors of
//   one go. Powers of two keep every bit but for the order of the product's own sums. Other factors round once in place
//   of twice; `exact` leaves those alone.
// fuse: pointwise operators whose inner results nobody else sees become one plumb::pointwise (pointwise/pointwise.h):
//   add, sub, mul, div, neg, relu, sigmoid, tanh, exp, sqrt, silu, gelu, and the unit-scaled gelu, silu, silu_glu, add
//   and residual_add of 32 and 64 bits, with their factors. Values and gradients keep every bit but where factors
//   became one. Results for the gradient are saved if that takes less than computing them again (pointwise_steps.h).
// measure: a value that is rounded and tracked (plumb::simulate_format between plumb::track) is measured while it is
//   rounded, forward and backward; the numbers are the same.
//
// Left alone: values of unknown type, broadcast operands, results used elsewhere, anything with a write in between,
// chains whose inner operands three or more nodes use (their gradients would be summed in another order), values that
// are not in C order, chains that save too few passes over memory (functions take their time in any case), and few
// operators on tensors of less than `min_elements`, which stay in cache and where the one call costs more than it
// saves.
#pragma once

#include <memory>

#include "plumb/transforms/module.h"

namespace plumb {

struct OptimiseOptions {
  bool fold = true;
  bool fuse = true;
  bool exact = false;
  bool measure = true;
  int64_t min_elements = 1 << 18;
};

// Returns whether anything changed.
bool optimise(GraphModule& module, const OptimiseOptions& options = {}, Report* report = nullptr);

// Returns a new module that shares the tensors of `module`, with what is known of it.
std::shared_ptr<TransformedModule> compile(const std::shared_ptr<GraphModule>& module,
                                           const OptimiseOptions& options = {});

}  // namespace plumb
