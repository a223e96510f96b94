#include "plumb/checkpoint/optimizer_state.h"

#include <ATen/ATen.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>

#include "plumb/core/error.h"

namespace plumb {
namespace {

using torch::optim::Optimizer;

// One line a part of a state: its name, and whether every state has it.
template <class State, class Visit>
void visit_parts(State& state, const Visit& visit) {
  if constexpr (requires { state.exp_avg(); }) {
    visit("exp_avg", state.exp_avg(), true);
    visit("exp_avg_sq", state.exp_avg_sq(), true);
    visit("max_exp_avg_sq", state.max_exp_avg_sq(), false);
  } else {
    visit("momentum_buffer", state.momentum_buffer(), true);
  }
}

constexpr const char* kParts[] = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"};

template <class State>
void add_state(torch::optim::OptimizerParamState& held, const std::string& name, NamedTensors& all) {
  auto& state = static_cast<State&>(held);
  if constexpr (requires { state.step(); })
    all.emplace_back("step/" + name, at::scalar_tensor(state.step(), at::kLong));
  visit_parts(state, [&](const char* part, const at::Tensor& tensor, bool) {
    if (tensor.defined()) all.emplace_back(std::string(part) + "/" + name, tensor);
  });
}

template <class State>
std::unique_ptr<torch::optim::OptimizerParamState> read_state(const std::string& place, const ReadState& read_key,
                                                              const std::string& name, const at::Tensor& parameter) {
  auto state = std::make_unique<State>();
  std::map<std::string, at::Tensor> there;
  for (const char* part : kParts) {
    const at::Tensor stored = read_key(std::string(part) + "/" + name);
    if (stored.defined()) there.emplace(part, stored);
  }
  if (there.empty()) return nullptr;
  const auto take = [&](const std::string& part) {
    const auto found = there.find(part);
    if (found == there.end())
      throw Error(ErrorKind::UnknownName, place + ": holds no state of an optimizer '" + part + "/" + name + "'");
    const at::Tensor stored = found->second;
    there.erase(found);
    return stored;
  };
  if constexpr (requires { state->step(); }) {
    // Python's optimizers count in floating point.
    state->step(take("step").to(at::kLong).template item<int64_t>());
  }
  visit_parts(*state, [&](const char* part, at::Tensor& tensor, bool always) {
    if (!always && !there.contains(part)) return;
    const at::Tensor stored = take(part);
    if (stored.sizes() != parameter.sizes())
      throw Error(ErrorKind::TensorMismatch,
                  place + ": '" + part + "/" + name + "' has another shape than its parameter", "",
                  "load it into the model that it was saved from");
    tensor = stored.to(parameter.device());
  });
  if (!there.empty())
    throw Error(ErrorKind::TensorMismatch, place + ": the state of '" + name + "' is that of another kind of optimizer",
                "", "resume with the optimizer that the run was begun with");
  return state;
}

// Calls the function with the type of a parameter's state: SGD's and Adam's have nothing in common here.
template <class Function>
void by_kind(const Optimizer& optimizer, const Function& function) {
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return function(torch::optim::AdamWParamState());
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return function(torch::optim::AdamParamState());
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return function(torch::optim::SGDParamState());
  throw Error(ErrorKind::Unsupported, "checkpoints hold the state of Adam, AdamW and SGD, not of this optimizer");
}

}  // namespace

NamedTensors optimizer_state(const Optimizer& optimizer, const NamedTensors& parameters) {
  NamedTensors all;
  by_kind(optimizer, [&]<class State>(const State&) {
    for (const auto& [name, parameter] : parameters) {
      const auto held = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (held != optimizer.state().end()) add_state<State>(*held->second, name, all);
    }
  });
  return all;
}

ReadState reader_of(const Checkpoint& checkpoint) {
  return [&](const std::string& key) {
    return checkpoint.find_optimizer(key) ? checkpoint.read_optimizer(key) : at::Tensor();
  };
}

void load_optimizer_state(Optimizer& optimizer, const NamedTensors& parameters, const Checkpoint& checkpoint) {
  load_optimizer_state(optimizer, parameters, checkpoint.folder(), reader_of(checkpoint));
}

void load_optimizer_state(Optimizer& optimizer, const NamedTensors& parameters, const std::string& place,
                          const ReadState& read) {
  if (!read) throw Error(ErrorKind::InvalidArgument, place + ": the function that reads the state is empty");
  by_kind(optimizer, [&]<class State>(const State&) {
    for (const auto& [name, parameter] : parameters) {
      auto state = read_state<State>(place, read, name, parameter);
      void* key = parameter.unsafeGetTensorImpl();
      if (state) {
        optimizer.state()[key] = std::move(state);
      } else {
        optimizer.state().erase(key);
      }
    }
  });
}

}  // namespace plumb
