#include "plumb/autograd/stage_backward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>

#include "plumb/autograd/backward_halves.h"
#include "plumb/core/error.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

bool can_have_gradient(const at::Tensor& t) {
  return t.defined() && (at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()));
}

GradientMeta meta_of(const Edge& edge) {
  const auto& meta = edge.function->input_metadata(edge.input_nr);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(meta.shape_as_dim_vector());
  return {{sizes.begin(), sizes.end()}, meta.options()};
}

BackwardRoots collect_roots(const Tensors& outputs, const Tensors& output_grads) {
  if (!output_grads.empty() && output_grads.size() != outputs.size()) {
    throw Error(ErrorKind::StructureMismatch,
                "stage backward got " + std::to_string(outputs.size()) + " outputs and " +
                    std::to_string(output_grads.size()) + " output gradients",
                "", "give one gradient per output (undefined for none), or none at all");
  }
  BackwardRoots roots;
  for (size_t i = 0; i < outputs.size(); i++) {
    const auto& out = outputs[i];
    if (!out.defined() || !out.requires_grad()) continue;
    auto edge = torch::autograd::impl::gradient_edge(out);
    if (!edge.function) continue;  // a view made without grad mode: it says so because its base does
    // Sizes are the node's, not the tensor's: a handle stands for a tensor that is gone.
    const auto [sizes, options] = meta_of(edge);
    at::Tensor grad = output_grads.empty() ? at::Tensor() : output_grads[i];
    if (!grad.defined()) {
      if (!output_grads.empty() && c10::multiply_integers(sizes) != 1) {
        throw Error(ErrorKind::StructureMismatch,
                    "output " + std::to_string(i) + " of the stage, " + describe(sizes, options) +
                        ", requires a gradient and got none; only a one-element output may go without",
                    "", "give a gradient of the same sizes, or leave the output out");
      }
      grad = at::ones(sizes, options);
    } else if (grad.sizes() != sizes) {
      throw Error(ErrorKind::TensorMismatch, "output " + std::to_string(i) + " of the stage is " +
                                                 describe(sizes, options) + ", its gradient " + describe(grad));
    }
    roots.edges.push_back(std::move(edge));
    roots.grads.push_back(std::move(grad));
  }
  return roots;
}

// Runs a backward; what it throws becomes an Error that describes its arguments.
template <class Run>
auto run_described(const char* what, const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs,
                   const Run& run) {
  try {
    return run();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& cause) {
    const std::string words = first_line(cause.what());
    const bool written = words.find("modified by an inplace operation") != std::string::npos;
    std::throw_with_nested(Error(
        ErrorKind::ExecutionFailed, std::string(what) + " failed: " + words,
        "outputs " + describe(outputs) + "; output gradients " + describe(output_grads) + "; inputs " +
            describe(inputs),
        written ? "let the forward compute with a clone() of a buffer that it also writes, as another microbatch's "
                  "forward may write it before this one's backward"
                : ""));
  }
}

void add_seeds(BackwardRoots& roots, const std::vector<Edge>& input_edges, const Tensors& seeds) {
  if (seeds.empty()) return;
  if (seeds.size() != input_edges.size()) {
    throw Error(ErrorKind::StructureMismatch, "a stage of " + std::to_string(input_edges.size()) + " inputs got " +
                                                  std::to_string(seeds.size()) + " input gradients to start from");
  }
  for (size_t i = 0; i < seeds.size(); i++) {
    if (!seeds[i].defined() || !input_edges[i].function) continue;
    roots.edges.push_back(input_edges[i]);
    roots.grads.push_back(seeds[i]);
  }
}

// A tensor that comes twice has its gradient at the first place.
std::vector<Edge> leaf_edges(const Tensors& inputs, bool leaves_only) {
  std::vector<Edge> edges(inputs.size());
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    if (leaves_only && !inputs[i].is_leaf()) {
      throw Error(ErrorKind::InvalidState,
                  "input " + std::to_string(i) + " of the stage, " + describe(inputs[i]) + ", is not a leaf", "",
                  "detach it before the stage's forward, or use an InputBoundary");
    }
    Edge edge = torch::autograd::impl::gradient_edge(inputs[i]);
    if (std::find(edges.begin(), edges.end(), edge) == edges.end()) edges[i] = std::move(edge);
  }
  return edges;
}

}  // namespace

at::Tensor backward_handle(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return {};
  at::Tensor handle = at::empty({0}, output.options());
  torch::autograd::impl::set_gradient_edge(handle, torch::autograd::impl::gradient_edge(output));
  return handle;
}

std::optional<GradientMeta> gradient_meta(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return std::nullopt;
  const Edge edge = torch::autograd::impl::gradient_edge(output);
  return edge.function ? std::optional(meta_of(edge)) : std::nullopt;
}

InputBoundary::InputBoundary(const Tensors& values, const std::vector<bool>& wants_gradient)
    : state(std::make_shared<State>()) {
  if (wants_gradient.size() != values.size()) {
    throw Error(ErrorKind::StructureMismatch, "an input boundary of " + std::to_string(values.size()) + " values got " +
                                                  std::to_string(wants_gradient.size()) + " gradient flags");
  }
  state->inputs.reserve(values.size());
  state->edges.resize(values.size());
  for (size_t i = 0; i < values.size(); i++) {
    if (!values[i].defined()) {
      state->inputs.emplace_back();
      continue;
    }
    // Shares memory and version counter with the value, so that a write is noticed where the value was saved.
    at::Tensor alias = values[i].tensor_data();
    if (wants_gradient[i] && can_have_gradient(values[i])) {
      if (!state->node) state->node = make_node<StageInputNode>();
      torch::autograd::create_gradient_edge(alias, state->node);
      state->edges[i] = torch::autograd::impl::gradient_edge(alias);
    }
    state->inputs.push_back(std::move(alias));
  }
}

const Tensors& InputBoundary::inputs() const { return state->inputs; }
void InputBoundary::release_inputs() { state->inputs.clear(); }

std::optional<GradientMeta> InputBoundary::gradient_meta(size_t index) const {
  if (index >= state->edges.size() || !state->edges[index].function) return std::nullopt;
  return meta_of(state->edges[index]);
}

bool is_boundary_input(const at::Tensor& x) {
  return dynamic_cast<const StageInputNode*>(x.grad_fn().get()) != nullptr;
}

Tensors stage_backward(const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs) {
  return run_described("stage backward", outputs, output_grads, inputs, [&] {
    auto edges = leaf_edges(inputs, /*leaves_only=*/true);
    auto roots = collect_roots(outputs, output_grads);
    if (!roots.edges.empty()) run_engine(roots.edges, roots.grads, /*keep_graph=*/false);
    Tensors grads(inputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
      if (edges[i].function) grads[i] = inputs[i].grad();
    }
    for (size_t i = 0; i < inputs.size(); i++) {
      if (edges[i].function) inputs[i].mutable_grad() = at::Tensor();
    }
    return grads;
  });
}

Tensors stage_backward(const Tensors& outputs, const Tensors& output_grads, const InputBoundary& inputs,
                       const Tensors& input_seeds) {
  const auto& boundary = *inputs.state;
  return run_described("stage backward", outputs, output_grads, boundary.inputs, [&] {
    auto roots = collect_roots(outputs, output_grads);
    add_seeds(roots, boundary.edges, input_seeds);
    auto* node = static_cast<StageInputNode*>(boundary.node.get());
    if (node != nullptr) node->gradients.clear();
    if (!roots.edges.empty()) run_engine(roots.edges, roots.grads, /*keep_graph=*/false);
    Tensors grads(boundary.edges.size());
    if (node == nullptr || node->gradients.empty()) return grads;
    for (size_t i = 0; i < grads.size(); i++) {
      if (boundary.edges[i].function) grads[i] = std::move(node->gradients[boundary.edges[i].input_nr]);
    }
    node->gradients.clear();
    return grads;
  });
}

InputHalf stage_backward_input(const Tensors& outputs, const Tensors& output_grads, const Tensors& inputs,
                               bool keep_graph) {
  return run_described("input half of the stage backward", outputs, output_grads, inputs, [&] {
    return run_input_half(collect_roots(outputs, output_grads), leaf_edges(inputs, /*leaves_only=*/false), keep_graph);
  });
}

InputHalf stage_backward_input(const Tensors& outputs, const Tensors& output_grads, const InputBoundary& inputs,
                               const Tensors& input_seeds, bool keep_graph) {
  const auto& boundary = *inputs.state;
  return run_described("input half of the stage backward", outputs, output_grads, boundary.inputs, [&] {
    auto roots = collect_roots(outputs, output_grads);
    add_seeds(roots, boundary.edges, input_seeds);
    return run_input_half(roots, boundary.edges, keep_graph);
  });
}

namespace {

// `only`: the leaves whose .grad is added to; null: all.
void weight_half(DeferredWeights& deferred, const edge_list* only, bool retain_graph) {
  if (!deferred.pending()) {
    throw Error(ErrorKind::InvalidState, "the weight half of this stage backward has run already", "",
                "run stage_backward_input first, or pass retain_graph to the weight half");
  }
  if (only == nullptr || !only->empty()) {
    run_described("weight half of the stage backward", {}, {}, {},
                  [&] { run_weight_half(*deferred.state, only ? *only : edge_list{}, retain_graph); });
  }
  if (!retain_graph) deferred.state.reset();
}

}  // namespace

void stage_backward_weight(DeferredWeights& deferred, bool retain_graph) {
  weight_half(deferred, nullptr, retain_graph);
}

void stage_backward_weight(DeferredWeights& deferred, const Tensors& weights, bool retain_graph) {
  edge_list only;
  for (const at::Tensor& weight : weights) {
    if (weight.defined() && weight.requires_grad()) only.push_back(torch::autograd::impl::gradient_edge(weight));
  }
  weight_half(deferred, &only, retain_graph);
}

}  // namespace plumb
