// A graph's node as steps of a pointwise program. Not for other rooms.
#pragma once

#include <optional>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/pointwise/pointwise.h"

namespace plumb {

// In the steps, inputs (#0, #1) stand for `operands`.
struct LoweredNode {
  std::vector<Value*> operands;
  std::vector<PointwiseStep> steps;
  bool recomputes = false;  // its own gradient computes inner results again
};

// Returns nullopt for operators that are not pointwise, or whose operands differ in shape or dtype or have unknown
// types.
std::optional<LoweredNode> lower_pointwise(const Node* node);

// The savings of a chain for each operator taken into it.
struct Saving {
  int calls = 0;   // saved calls of operators that are a loop: each takes as long as thousands of elements
  int passes = 0;  // over memory, in the forward or backward direction
  Saving& operator+=(const Saving& other) {
    calls += other.calls, passes += other.passes;
    return *this;
  }
};
Saving saving_of(const Node* node, const LoweredNode& lowered);

// Returns the scales that a unit-scaled node chooses when it runs, from those given or `rule`; nullopt if unknown.
std::optional<std::vector<double>> chosen_scales(const Node* node, size_t constrained, std::vector<double> rule);

// Merges factors that follow each other, drops factors of one; `exact`: only where that rounds as before. cheap: of
// each step, as below.
void merge_factors(PointwiseProgram& program, std::vector<bool>& cheap, bool exact);

// Marks the steps whose results are better saved than computed again. cheap: steps that were computed again anyway.
void choose_kept(PointwiseProgram& program, const std::vector<bool>& cheap);

}  // namespace plumb
