// Table of pass `fuse_patterns`: the forms of an operator that is written as several.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plumb/graph/pattern.h"

namespace plumb {

struct PatternRule {
  std::string name;
  bool exact;          // the same bits, gradients too
  bool through_casts;  // casts between floating types may stand anywhere in between
  Pattern pattern;
  // Makes the operator at the insertion point, or returns null if the types do not fit it.
  std::function<Node*(Graph&, const Match&)> build;
};

const std::vector<PatternRule>& pattern_rules();

// Returns whether `x.matmul(w.t()) + b` and `linear(x, w, b)` are the same bits, gradients too, for tensors of these
// types: both are run on random numbers (not the process's own). False where they cannot be run here.
bool same_bits_with_bias(const TensorMeta& x, const TensorMeta& w);

}  // namespace plumb
