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

#include "plumb/graph/graph_module.h"

namespace plumb {

struct FusePatternsOptions {
  bool inexact = false;
};

// Returns whether anything changed; what was fused how often goes to `report`.
bool fuse_patterns(Graph& graph, const FusePatternsOptions& options = {}, std::vector<std::string>* report = nullptr);

}  // namespace plumb
