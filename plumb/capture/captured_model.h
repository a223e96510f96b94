// A model as graphs, one for each signature of its inputs: a last partial batch is no error.
//
//   CapturedModel fast(net, [](auto graph) { return unit_scale(graph); });   // or without a transform
//   torch::optim::AdamW optimizer(fast.parameters());  // after the first call, which makes the first graph
//   for (auto& [x, y] : batches) loss(fast(x), y).backward();
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/graph/graph_store.h"

namespace plumb {

// Returns the key of the graph that a call needs: dtype, sizes, device and requires_grad of every input, the modes of
// the model's modules, what they print (torch's layers: their options), and autocast. Members of a module's struct
// cannot be seen; a module that overrides pretty_print() to print them is followed, too.
std::string signature_of(const torch::nn::Module& model, const std::vector<at::Tensor>& inputs);

// Gives `to` the parameters and buffers of `from` that have the same names, so that both train the same tensors.
void share_state(const GraphModule& from, GraphModule& to);

// Throws Error(InvalidState), naming it, if a parameter or buffer of the model is another tensor than in `captured`.
void check_same_tensors(const torch::nn::Module& model, const State& captured);

// `M` as capture() takes it: a torch::nn::ModuleHolder or a shared_ptr. All graphs share the parameters and buffers of
// the first; without a transform these are the model's own. They are those that the model has at the first call: one
// that is exchanged later (replace_module(), a new tensor in a buffer's place) is refused by name. Not for several
// threads at once.
template <typename M>
class CapturedModel {
 public:
  // Makes what runs of a captured graph: transforms that leave the names of parameters alone.
  using Transform = std::function<std::shared_ptr<GraphModule>(const std::shared_ptr<GraphModule>&)>;

  explicit CapturedModel(M model, Transform transform = {})
      : model_(std::move(model)), transform_(std::move(transform)) {}

  // Returns the graph for inputs like these: the one there is, or one captured now. Throws what capture() and
  // check_same_tensors() throw, and Error(InvalidArgument) for a transform that returns null.
  template <typename... Tensors>
  std::shared_ptr<GraphModule> graph(const Tensors&... inputs) {
    const torch::nn::Module& module = capture_detail::module_of(model_);
    if (first_) check_same_tensors(module, state_);
    const std::string key = signature_of(module, {inputs...});
    if (const auto* known = graphs_.find(key)) return *known;
    auto made = capture(model_, inputs...);
    if (transform_) made = transform_(made);
    if (!made) throw Error(ErrorKind::InvalidArgument, "the transform of a CapturedModel has returned null");
    if (!first_) state_ = state_of(module), first_ = made;
    if (made != first_) share_state(*first_, *made);
    return graphs_.add(key, made);
  }

  template <typename... Tensors>
  at::Tensor operator()(const Tensors&... inputs) {
    return (*graph(inputs...))(inputs...);
  }

  // Returns those of the first graph. Throws Error(InvalidState) before the first call.
  std::vector<at::Tensor> parameters() const { return first().parameters(); }
  const GraphModule& first() const {
    if (first_) return *first_;
    throw Error(ErrorKind::InvalidState, "the model has no graph yet", "", "call it once");
  }
  size_t num_graphs() const { return graphs_.size(); }

 private:
  M model_;
  Transform transform_;
  State state_;  // the model's at the first capture
  std::shared_ptr<GraphModule> first_;
  GraphStore<std::string, std::shared_ptr<GraphModule>> graphs_{64};
};

}  // namespace plumb
