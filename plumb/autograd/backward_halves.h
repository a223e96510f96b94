// Declarations that the files of stage_backward share.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "plumb/autograd/backward_graph.h"
#include "plumb/autograd/stage_backward.h"

namespace plumb {

struct InputBoundary::State {
  NodePtr node;
  Tensors inputs;
  std::vector<Edge> edges;  // by input; empty function where no gradient stops
};

struct DeferredWeights::State {
  struct Start {
    Edge edge;
    at::Tensor grad;
    bool hooks_done;          // the node's hooks on incoming gradients have run
    NodePtr maker = nullptr;  // did all its work in the input half and made this gradient of a leaf
  };
  struct Cut {
    NodePtr node;
    size_t index;
    Edge edge;
  };
  std::vector<Start> starts;
  std::vector<Cut> cuts;  // still to be cut, because the graph is kept whole
  edge_list only;         // the leaves whose .grad is added to; empty: all
  bool chains = false;    // see defers_chains()
};

struct BackwardAccess {
  static const InputBoundary::State& of(const InputBoundary& b) { return *b.state_; }
  static DeferredWeights::State& fresh(DeferredWeights& d) {
    d.state_ = std::make_unique<DeferredWeights::State>();
    return *d.state_;
  }
  static std::unique_ptr<DeferredWeights::State>& state(DeferredWeights& d) { return d.state_; }
  // The weight half adds to the `.grad` of these tensors alone. Not empty.
  static void restrict_to(DeferredWeights& d, const Tensors& weights) {
    if (!d.state_) return;
    d.state_->only.clear();
    for (const at::Tensor& w : weights) d.state_->only.push_back(torch::autograd::impl::gradient_edge(w));
  }
  // Empty once the weight half has run.
  static std::vector<DeferredWeights::State::Start> starts(const DeferredWeights& d) {
    return d.state_ ? d.state_->starts : std::vector<DeferredWeights::State::Start>();
  }
};

// Roots of a backward: edges and gradients of the outputs that take part.
struct BackwardRoots {
  edge_list edges;
  variable_list grads;
};

enum class IntoGrad { No, Yes };

// With outputs: answers their gradients, or adds them to the `.grad` of these leaves and of no others.
inline variable_list run_engine(const edge_list& roots, const variable_list& grads, bool keep_graph,
                                const edge_list& outputs = {}, IntoGrad into = IntoGrad::No) {
  const bool accumulate = outputs.empty() || into == IntoGrad::Yes;
  return torch::autograd::Engine::get_default_engine().execute(roots, grads, keep_graph, /*create_graph=*/false,
                                                               accumulate, outputs);
}

// The input half from these roots; `inputs` by input, an empty function where none is wanted.
InputHalf run_input_half(const BackwardRoots& roots, const std::vector<Edge>& inputs, bool keep_graph);
void run_weight_half(DeferredWeights::State& deferred, bool retain_graph);

}  // namespace plumb
