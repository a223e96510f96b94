// Unit scaling as a pass (Unit Scaling, arXiv 2303.11257; u-muP, arXiv 2407.17465): every operator that has a
// unit-scaled equivalent becomes it, residual adds become weighted ones, and weights start with unit variance.
//
//   auto scaled = plumb::unit_scale(module);           // module: std::shared_ptr<GraphModule>
//   std::cout << scaled->reports.back().to_text();
//
// Five stages:
//   1. operators in `replace` become what is given there, first as the program wrote them, then as later stages see
//      them (addmm, then linear); what is found nowhere is reported;
//   2. linear, matmul, convolutions, embedding, gelu, silu, softmax, layer_norm, rms_norm, dropout, cross_entropy,
//      mse_loss, add and scaled_dot_product_attention become plumb::* operators; recurrent layers and cells, and
//      products of groups of rows by a matrix each, stay what they are, with factors around them (recurrent.h,
//      experts.h);
//   3. an add of which one operand is computed from the other is residual: plumb::residual_split at the skip, and
//      plumb::residual_add with weight tau. Numbers from 2^-12 to 2^12 that weight its operands, as in 2 * x + f(x),
//      and alpha are taken into tau. Only uses on the residual branch see the split's branch side. (Two branches of one
//      skip that share their first operators share the split of the one that ends first, for gradients can be weighted
//      once.)
//   4. operators with no residual_add after them lose their constraint: each of their scales is as its rule says. An
//      add inside a residual branch keeps its constraint, any other is unconstrained: nothing goes around it;
//   5. weights of the replaced operators are divided by their standard deviation, biases become zero. A tensor is
//      changed once, whatever its names; views of it (packed projections) count as it. If something else uses a
//      weight, too, then the weight is left as it is, and so are the operators that use it. A buffer that is a weight
//      is divided, too; an operator whose weight is a plain tensor of no state dict stays.
//
// In-place adds count as adds where nobody sees the difference (pass functionalise). Passes simulate_format and
// track_scales may have been run before: the result is as if unit_scale had come first.
// Left alone: operators without an equivalent, adds of numbers, integer arithmetic, attention masks, computations that
// no gradient flows through. The report says so.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plumb/transforms/module.h"
#include "plumb/transforms/scale/parameter_scaling.h"

namespace plumb {

// Stage 1. `from`: "aten::gelu" (every overload) or "aten::add.Tensor". Either `to`, an operator given the same
// arguments in the same order (those that it does not take must be at their defaults), or `build`, which makes a node
// with as many results at the graph's insertion point, or returns null to leave this one to the later stages.
struct Replacement {
  std::string from;
  std::string to;
  std::function<Node*(Graph& graph, const Node& node)> build;
};

enum class TauRule {
  Fixed,  // tau_attention for branches with attention, else tau_mlp
  Depth,  // u-muP, appendix G.2: all attention branches together weigh residual_attn_ratio times all others, and both
          // together residual_mult times the input, at every depth
};

struct UnitScaleOptions {
  std::vector<Replacement> replace;
  TauRule tau_rule = TauRule::Fixed;
  double tau_attention = 0.01;
  double tau_mlp = 0.5;
  double residual_mult = 1.0;
  double residual_attn_ratio = 1.0;
  // Stage 5. Off for a graph that shares parameters scaled before (the model captured again for another shape).
  bool scale_parameters = true;
  // Stage 5 of a live model, whose tensors the graph shares: its parameters are confirmed, written in place or given
  // back instead of being replaced.
  ParameterScaling* live = nullptr;
  // Nodes, by the name of their first result, that are replacements already: nothing is done to them, but that those
  // with `true` lose their constraint in stage 4.
  std::map<std::string, bool> keep;
};

// Rewrites the graph in place. A changed parameter becomes a new tensor of the state; all others stay shared with the
// module's other users. Returns whether anything changed. Adds to `mup`. Throws Error(InvalidArgument) for a tau that
// is no positive number, and Error(Unsupported) for a head that split_vocabulary divided.
bool unit_scale(GraphModule& module, const UnitScaleOptions& options, Report* report = nullptr,
                MupTable* mup = nullptr);

// Returns a new module with its own copy of parameters and buffers; `module` stays as it is.
std::shared_ptr<TransformedModule> unit_scale(const std::shared_ptr<GraphModule>& module,
                                              const UnitScaleOptions& options = {});

}  // namespace plumb
