// A stage as the runtime sees it: a callable on flat tensors, with named parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plumb/autograd/recompute/recompute.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/graph/graph.h"
#include "plumb/partition/stage_specializer.h"

namespace plumb {

struct NamedTensor {
  std::string name;  // as in the whole model: "layers.3.attn.wq.weight"
  at::Tensor tensor;
};

// Which microbatch of a step a stage runs.
struct Microbatch {
  int index = 0;
  // The sizes of the model's inputs it comes from, those that are known here; empty if they are as the layout says, or
  // it says nothing.
  ModelSizes sizes = {};
};

class StageFunction {
 public:
  virtual ~StageFunction() = default;
  // Whether the backward computes cheap results again instead of keeping them: less memory, the same bits.
  Recompute recompute = Recompute::Cheap;
  // Runs one microbatch. Inputs and outputs are in the order of the pipe's table.
  virtual Tensors forward(const Tensors& inputs) = 0;
  // Called by the runtime; a stage overrides it to learn which microbatch it runs.
  virtual Tensors run(const Tensors& inputs, const Microbatch& microbatch) {
    (void)microbatch;
    return forward(inputs);
  }
  // Leaves whose gradients are accumulated; frozen ones may be among them, undefined ones may not. Asked for at the
  // start of every step.
  virtual std::vector<NamedTensor> parameters() const { return {}; }
  // The stage's device: the runtime moves inputs and gradients there. Nullopt: the stage takes them on any device.
  virtual std::optional<at::Device> device() const {
    const auto own = parameters();
    return own.empty() || !own.front().tensor.defined() ? std::nullopt : std::optional(own.front().tensor.device());
  }
  // Buffers and parameters that forwards write (running statistics, rows that an embedding shortens). Asked for at the
  // start, and for each microbatch that is audited.
  virtual std::vector<NamedTensor> written_state() const { return {}; }
  // The graph that the stage runs, of which errors name nodes; null if there is none.
  virtual const Graph* graph() const { return nullptr; }
  // Returns whether the stage does a part of its weight gradients by itself: the runtime then runs autograd's whole
  // backward in the place of the input half, asks for the work right after it, and does it in the place of the weight
  // half.
  virtual bool has_own_weight_work() const { return false; }
  virtual std::function<void()> own_weight_work() { return {}; }
};

// A stage from a function and its parameters.
class LambdaStage : public StageFunction {
 public:
  using Function = std::function<Tensors(const Tensors&)>;
  // Throws Error(InvalidArgument) for an empty function.
  LambdaStage(Function function, std::vector<NamedTensor> parameters);
  Tensors forward(const Tensors& inputs) override { return function_(inputs); }
  std::vector<NamedTensor> parameters() const override { return parameters_; }

 private:
  Function function_;
  std::vector<NamedTensor> parameters_;
};

}  // namespace plumb
