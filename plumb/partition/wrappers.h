// C++ models that mark themselves, and models together with their loss.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/partition/pipe_split.h"

namespace plumb {

// A sequence with a mark between any two neighbors: one stage a module. Every module takes and gives one tensor.
struct PipeSequentialImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(at::Tensor input) {
    bool first = true;
    for (torch::nn::AnyModule& module : *this) {
      if (!std::exchange(first, false)) pipe_split();
      input = module.forward<at::Tensor>(std::move(input));
    }
    return input;
  }
};
TORCH_MODULE(PipeSequential);

// A model together with its loss, loss_fn(module(x), targets), whose one output is the loss. `Model` is a
// torch::nn::ModuleHolder; its parameters are "module.NAME". For SplitOptions::loss_spec: c10::IValue(true).
template <typename Model>
struct TrivialLossWrapperImpl : torch::nn::Module {
  using LossFn = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& targets)>;
  TrivialLossWrapperImpl(Model model, LossFn loss)
      : module(register_module("module", std::move(model))), loss_fn(std::move(loss)) {
    if (!loss_fn) throw Error(ErrorKind::InvalidArgument, "trivial_loss_wrapper: the loss is empty", "", "give one");
  }
  at::Tensor forward(const at::Tensor& input, const at::Tensor& targets) { return loss_fn(module(input), targets); }
  Model module;
  LossFn loss_fn;
};
template <typename Model>
std::shared_ptr<TrivialLossWrapperImpl<Model>> trivial_loss_wrapper(
    Model model, typename TrivialLossWrapperImpl<Model>::LossFn loss) {
  return std::make_shared<TrivialLossWrapperImpl<Model>>(std::move(model), std::move(loss));
}

}  // namespace plumb
