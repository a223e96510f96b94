// The way back from unit scaling: factors of unit-scaled operators go into parameters, so that torch's own operators
// compute the same function, and a plain model runs on the trained weights.
//
//   auto plain = plumb::fold(scaled);                 // aten operators only
//   std::cout << plain->reports.back().to_text();     // what was divided by what, and what could not be folded
//
// Every tensor of the unit-scaled graph is a factor times the plain graph's. Each operator ties the factors of its
// operands and results (factor_rules.h): these are linear equations between logarithms, and a parameter's factor is an
// unknown that equations decide. Where they leave a choice, norms keep their inputs (so that their eps weighs the
// same), then results of layers have factor 1, then embeddings and gains stay as they are. Where equations contradict
// each other, as for one tensor that must have two factors, the plain graph keeps a multiplication, which the report
// names (ReportKind::Remains).
//
// The function is that of evaluation (dropout's factor is 1), at the sizes of this graph: the factors of attention,
// softmax and products of activations follow from the length of the input. Rounding and measuring nodes go.
#pragma once

#include <memory>

#include "plumb/transforms/module.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb {

// Rewrites the graph in place. A changed parameter or buffer becomes a new tensor of the state. Returns whether
// anything changed. Throws Error(Unsupported) naming a node that writes in place into a value whose factor must change
// there, or a recurrent one that drops between its layers, whose weights have other factors in training.
bool fold(GraphModule& module, Report* report = nullptr);

// Returns a new module with its own copy of parameters and buffers, and without tags; `module` stays as it is.
std::shared_ptr<TransformedModule> fold(const std::shared_ptr<GraphModule>& module);

// Returns a unit-scaled copy of a plain module that computes the same function, for weights that were trained: they are
// multiplied by the factors that fold() would divide them by, and eps of norms follows. Outputs are equal within
// rounding at the sizes of this graph; fold() of it gives the plain module again. Where one tensor would have to have
// two factors a multiplication stands in the graph, which the report names (ReportKind::Remains): behind it tensors
// have the plain model's scale. Throws as fold() does.
std::shared_ptr<TransformedModule> unit_scale_preserving(const std::shared_ptr<GraphModule>& module,
                                                         UnitScaleOptions options = {});

}  // namespace plumb
