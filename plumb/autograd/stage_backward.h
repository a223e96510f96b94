// Backward of one pipeline stage on autograd's own graph: whole, or in an input half and a weight half.
//
// The gradients of both ways are bit for bit those of torch::autograd::backward() on the same outputs: the same nodes
// run in the same order, each once. The input half takes, besides the inputs' gradients, the gradients that flow into
// every node from which a path leaves towards the weights; the weight half starts from these, in one engine call.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace plumb {

using Tensors = std::vector<at::Tensor>;

// Returns a tensor without elements that stands for `output` in the functions below: it leads to the same place in
// autograd's graph, and the output's own memory may go.
at::Tensor backward_handle(const at::Tensor& output);

// The sizes, dtype and device that a gradient must have.
struct GradientMeta {
  std::vector<int64_t> sizes;
  at::TensorOptions options;
};
// Returns the metadata that the gradient of an output, or of its handle, must have; nullopt if it takes none.
std::optional<GradientMeta> gradient_meta(const at::Tensor& output);

// The start of a stage's autograd graph: gradients of the stage's inputs stop here.
struct InputBoundary {
  // One entry per input of the stage. `wants_gradient[i]` is ignored for undefined, integer and boolean values.
  InputBoundary(const Tensors& values, const std::vector<bool>& wants_gradient);

  // Returns the tensors to call the stage with: the same memory as `values`. They are no leaves, so that a stage may
  // begin with an in-place operator.
  const Tensors& inputs() const;
  // Releases the inputs; the boundary itself stays. Autograd keeps those that it saved.
  void release_inputs();
  // Returns the metadata that the gradient of input `index` must have; nullopt if it takes none.
  std::optional<GradientMeta> gradient_meta(size_t index) const;

  struct State;
  std::shared_ptr<State> state;
};

// Returns whether x is one of an InputBoundary's inputs(), whose gradient is also what the caller adds to it.
bool is_boundary_input(const at::Tensor& x);

// The pending work of the weight half. It holds the part of the graph and the gradients that it needs, nothing else.
struct DeferredWeights {
  // False once the weight half has run (or nothing was left to do).
  bool pending() const { return state != nullptr; }

  struct State;
  std::shared_ptr<State> state;
};

struct InputHalf {
  Tensors input_grads;  // one per input; undefined where the outputs do not depend on it or it has no gradient
  DeferredWeights deferred;
};

// Accumulates the gradients of all leaves (the parameters' `.grad`) and returns those of the inputs: one per input,
// undefined where there is none.
//
// outputs: tensors that require no gradient, or are undefined, are skipped with their gradients.
// output_grads: empty means ones for every output. An undefined entry means ones for a one-element output and is an
//   error for any other. Sizes must be the output's.
// inputs: leaf tensors (an earlier `.grad` is added to the returned gradient and then reset) or an InputBoundary.
//   A tensor that is given twice has its gradient at the first place and none at the second.
// input_seeds: gradients the inputs already have from elsewhere (later users of the same value), summed first.
//   Boundary form only; empty, or one entry per input, undefined for none.
//
// Throws Error(StructureMismatch) for other numbers of gradients, Error(TensorMismatch) for other sizes,
// Error(InvalidState) without a graph, Error(ExecutionFailed) with autograd's reason; all describe the stage. Uses up
// the graph.
Tensors stage_backward(const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs);
Tensors stage_backward(const Tensors& outputs, const Tensors& output_grads, const InputBoundary& inputs,
                       const Tensors& input_seeds = {});

// Runs the input half: returns the gradients of the inputs only and touches no `.grad`. Arguments as for
// stage_backward; `inputs` may be any tensors of the graph that require grad, leaves or not.
//
// A node that must not run twice (a custom autograd function not of plumb's own, a node with hooks) does all its work
// in this half, weights included; only the accumulation into `.grad` waits. Where outputs do not depend on any input
// (stage 0 with integer inputs) everything waits for the weight half.
//
// Results that a checkpoint of torch.utils.checkpoint computes again for this half are kept if the weight half needs
// them too. A re-entrant checkpoint accumulates the gradients of the weights inside of it at once.
//
// keep_graph: leave the graph whole, for another backward; otherwise what only this half needed is freed at once.
InputHalf stage_backward_input(const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs,
                               bool keep_graph = false);
InputHalf stage_backward_input(const Tensors& outputs, const Tensors& output_grads, const InputBoundary& inputs,
                               const Tensors& input_seeds = {}, bool keep_graph = false);

// Runs the weight half: accumulates into the `.grad` of every leaf, or of these `weights` and no others, as backward()
// would have. retain_graph keeps the saved tensors and `deferred` usable again. Throws Error(InvalidState) if
// `deferred` has run already.
void stage_backward_weight(DeferredWeights& deferred, bool retain_graph = false);
void stage_backward_weight(DeferredWeights& deferred, const Tensors& weights, bool retain_graph = false);

}  // namespace plumb
