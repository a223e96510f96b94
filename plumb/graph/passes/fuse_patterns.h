// Puts high-level operators back where a program wrote them as several: C++'s torch::nn::functional::linear arrives as
// `t`, `addmm` or `t`, `matmul`, `add_`; later passes look for `aten::linear`.
//
// By default only where outputs and gradients stay the same bits: `addmm`, `mm` and `matmul` of a transposed parameter,
// and a bias added afterwards if both forms give the same bits when run here on this shape (CPU; else it stays a sum of
// its own). `inexact` also fuses forms that round differently in the last bits: that bias, silu, gelu (both forms),
// softmax, layer_norm, rms_norm and attention.
//
// Left alone: a form whose inner values are used elsewhere, written, or in another grad mode.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/graph/pattern.h"

namespace plumb {

struct FusePatternsOptions {
  bool inexact = false;
};

// Returns whether anything changed; what was fused how often goes to `report`.
bool fuse_patterns(Graph& graph, const FusePatternsOptions& options = {}, std::vector<std::string>* report = nullptr);

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
