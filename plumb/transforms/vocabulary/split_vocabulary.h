// Vocabulary parallelism (arXiv 2411.05288): divides a head and its cross entropy by words, so that a pipeline can
// spread them over its ranks.
//
// A linear layer into a cross entropy (with a view between them) becomes `parts` linear layers with a share of the
// words each. A part makes two numbers a row: the logarithm of the sum of its exponentials, and the logit of the target
// if that is its own. What follows adds them up to the same loss. Between ranks only these numbers and the layer's
// input travel, never logits.
//
// It is no change of order alone: sums over words are taken part by part, so losses and gradients are equal to the
// undivided model's up to rounding. Those of the divided model are the same bits in one process and in any pipeline.
//
// Each rank holds its rows of the head's weight and bias alone. They keep their name, with the rows behind it:
// "head.weight[0:1000]", "head.weight[1000:2000]". join_vocabulary() puts them together again.
#pragma once

#include <memory>
#include <string>

#include "plumb/transforms/module.h"

namespace plumb {

// Divides every such pair that it finds in `parts`, and leaves alone, with the reason in the report: a weight with
// other users (tied to an embedding), logits that something else reads, a loss with weights, smoothing or probabilities
// as targets, a unit-scaled loss, and a float-point type other than float32 and float64. Throws Error(InvalidArgument)
// for less than two parts.
std::shared_ptr<TransformedModule> split_vocabulary(const std::shared_ptr<GraphModule>& module, int parts);

// Returns the name of a parameter of the state that holds some rows of a divided one, or "".
std::string divided_parameter(const State& state);

// Returns a state in which the rows of each parameter are one tensor again, under its name. Throws
// Error(InvalidArgument) where rows are missing between others.
State join_vocabulary(const State& state);

}  // namespace plumb
