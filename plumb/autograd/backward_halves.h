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
    std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> pre_hooks = {};  // pre-hooks swapped out of the node
    std::unordered_map<size_t, std::unique_ptr<torch::autograd::FunctionPreHook>> retains_grad = {};
  };
  struct Cut {
    NodePtr node;
    size_t index;
    Edge edge;
  };
  std::vector<Start> starts;
  std::vector<Cut> cuts;  // still to be cut, because the graph is kept whole
  bool chains = false;    // see defers_chains()
};

// Roots of a backward: edges and gradients of the outputs that take part.
struct BackwardRoots {
  edge_list edges;
  variable_list grads;
};

enum class IntoGrad { No, Yes };

// With `outputs`: returns their gradients, or adds them to the `.grad` of these leaves and of no others.
inline variable_list run_engine(const edge_list& roots, const variable_list& grads, bool keep_graph,
                                const edge_list& outputs = {}, IntoGrad into = IntoGrad::No) {
  const bool accumulate = outputs.empty() || into == IntoGrad::Yes;
  return torch::autograd::Engine::get_default_engine().execute(roots, grads, keep_graph, /*create_graph=*/false,
                                                               accumulate, outputs);
}

// Runs the input half from these roots; `inputs` by input, an empty function where none is wanted.
InputHalf run_input_half(const BackwardRoots& roots, const std::vector<Edge>& inputs, bool keep_graph);
// `only`: the leaves whose .grad is added to; empty: all.
void run_weight_half(DeferredWeights::State& deferred, const edge_list& only, bool retain_graph);

}  // namespace plumb
