// The backward of a cut graph as data: which stage's gradients go where.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plumb/partition/stage_io.h"

namespace plumb {

// The gradient of a stage's input, as its backward gives it.
struct GradRef {
  int stage = 0;
  size_t input = 0;
  auto operator<=>(const GradRef&) const = default;
};

// One stage's backward, in the order in which stages on ranks of their own run.
//
// A value used by several stages gets its gradients in the order in which autograd would sum them in the undivided
// graph: a user's backward starts from the sum so far (`input_seeds`) and adds its own uses one by one. A separate
// addition of the stages' sums would round differently.
struct StageBackwardStep {
  int stage = 0;
  std::vector<std::optional<GradRef>> output_grads;  // one an output; none where no gradient comes (or the loss itself)
  std::vector<size_t> outputs_with_grads;            // the outputs that take part
  std::vector<std::optional<GradRef>> input_seeds;   // one an input: gradient it already has from later stages
};

struct SymbolicBackward {
  size_t loss_port = 0;  // output of the last stage that is the loss
  std::vector<StageBackwardStep> steps;
  std::string to_string(const PipeTable& table) const;
};

// Stages that cannot contribute to the loss have no step. Throws Error(InvalidState) without a loss or for a constant
// one.
SymbolicBackward make_backward(const PipeTable& table);

}  // namespace plumb
