#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <set>

#include "plumb/autograd/stage_backward.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/plan.h"
#include "plumb/partition/backward.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/wire.h"

namespace plumb {
namespace {

struct StageRun {
  // The stage's inputs, then its replicated parameters: autograd's graph begins there.
  std::optional<InputBoundary> boundary;
  std::map<std::string, size_t> shared;  // replicated parameters, by name here: which of these it is
  std::vector<c10::IValue> outputs;
  Tensors grads;  // of what is at the boundary, once the stage has gone back
};

}  // namespace

struct DetachExecutor::State {
  const Pipe& pipe;
  std::vector<StageRun> runs;
};

DetachExecutor::DetachExecutor(const Pipe& pipe) : state_(new State{pipe, {}}) {}
DetachExecutor::~DetachExecutor() = default;

std::vector<c10::IValue> DetachExecutor::forward(std::vector<c10::IValue> inputs) {
  const Pipe& pipe = state_->pipe;
  const PipeTable& table = pipe.table();
  if (inputs.size() != table.num_inputs) {
    throw Error(ErrorKind::StructureMismatch, str("the pipe takes ", table.num_inputs, " inputs, got ", inputs.size()));
  }
  auto& runs = state_->runs;
  runs.clear();
  for (int s = 0; s < pipe.num_stages(); ++s) {
    StageRun run;
    Tensors entering;
    std::vector<c10::IValue> values;
    for (const StageInputPort& in : table.stages[s].inputs) {
      c10::IValue v =
          in.source.is_model_input() ? inputs[in.source.index] : runs[in.source.stage].outputs[in.source.index];
      if (table.crosses_rounded(in.source) && v.isTensor() && v.toTensor().defined()) {
        const bool asks = v.toTensor().requires_grad();
        v = over_the_wire(v.toTensor().detach(), table.wire).requires_grad_(asks);
      }
      entering.push_back(v.isTensor() ? v.toTensor() : at::Tensor());
      values.push_back(std::move(v));
    }
    GraphModule& stage = *pipe.stage(s);
    for (const ReplicatedParam& param : table.replicated) {
      auto here = param.find(s);
      if (here == param.end() || !c10::GradMode::is_enabled()) continue;
      const at::Tensor own = stage.state().get(here->second).tensor;
      if (!own.requires_grad()) continue;
      run.shared.emplace(here->second, entering.size());
      entering.push_back(own);
    }
    std::vector<bool> asks;
    for (const at::Tensor& tensor : entering) asks.push_back(tensor.defined() && tensor.requires_grad());
    run.boundary.emplace(entering, asks);
    const Tensors& entered = run.boundary->inputs();
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].isTensor()) values[i] = entered[i];
    }
    plumb::State with_edges = stage.state();
    for (const auto& [name, place] : run.shared) {
      for (const Attr& attr : stage.state()) {
        if (attr.tensor.is_same(entering[place])) with_edges.set(attr.name, entered[place]);
      }
    }
    run.outputs =
        run.shared.empty() ? stage.run(std::move(values)) : Plan(stage.graph(), with_edges).run(std::move(values));
    runs.push_back(std::move(run));
  }
  return pipe.outputs_of(runs.back().outputs);
}

namespace {

void check_loss(const c10::IValue& loss, const std::string& output) {
  if (loss.isTensor() && loss.toTensor().defined() && loss.toTensor().requires_grad() && loss.toTensor().numel() == 1)
    return;
  throw Error(ErrorKind::TensorMismatch,
              "the loss, output %" + output + ", is no tensor of one element that requires a gradient");
}

// The gradients of replicated parameters, where there are any, to every stage's copy.
void add_to_copies(const Pipe& pipe, const std::vector<at::Tensor>& replicated) {
  at::NoGradGuard no_grad;
  for (size_t p = 0; p < replicated.size(); ++p) {
    if (!replicated[p].defined()) continue;
    std::set<const c10::TensorImpl*> given;  // copies may be one tensor
    for (const auto& [s, name] : pipe.replicated_params()[p]) {
      at::Tensor param = pipe.stage(s)->state().get(name).tensor;
      if (!given.insert(param.unsafeGetTensorImpl()).second) continue;
      const at::Tensor sum = replicated[p].to(param.device());
      param.mutable_grad() = param.grad().defined() ? param.grad() + sum : sum.clone();
    }
  }
}

}  // namespace

std::vector<at::Tensor> DetachExecutor::backward() {
  const Pipe& pipe = state_->pipe;
  const SymbolicBackward& plan = pipe.backward();
  auto& runs = state_->runs;
  if (runs.empty())
    throw Error(ErrorKind::InvalidState, "backward without a forward before it", "",
                "call forward() first, once a backward");
  const c10::IValue& loss = runs.back().outputs[plan.loss_port];
  check_loss(loss, pipe.table().stages.back().outputs[plan.loss_port].name);
  const PipeTable& table = pipe.table();
  auto grad_of = [&](const std::optional<GradRef>& ref) {
    const Tensors* grads = ref ? &runs[ref->stage].grads : nullptr;
    const at::Tensor grad = grads && ref->input < grads->size() ? (*grads)[ref->input] : at::Tensor();
    if (!grad.defined() || !table.crosses_rounded(table.stages[ref->stage].inputs[ref->input].source)) return grad;
    at::NoGradGuard no_grad;
    return over_the_wire(grad, {table.wire.bwd, "none"});
  };
  // A replicated parameter's gradient so far, handed from a later stage's copy to an earlier one's: see
  // StageBackwardStep.
  std::vector<at::Tensor> replicated(pipe.replicated_params().size());
  for (const StageBackwardStep& step : plan.steps) {
    StageRun& run = runs[step.stage];
    auto place_of = [&](size_t p) -> std::optional<size_t> {
      auto here = pipe.replicated_params()[p].find(step.stage);
      auto it = here == pipe.replicated_params()[p].end() ? run.shared.end() : run.shared.find(here->second);
      return it == run.shared.end() ? std::nullopt : std::optional(it->second);
    };
    Tensors outputs, grads, seeds(run.boundary->inputs().size());
    for (size_t i = 0; i < step.input_seeds.size(); ++i) seeds[i] = grad_of(step.input_seeds[i]);
    for (size_t p = 0; p < replicated.size(); ++p) {
      if (auto place = place_of(p)) seeds[*place] = replicated[p];
    }
    for (size_t j : step.outputs_with_grads) {
      if (!run.outputs[j].isTensor()) continue;
      const at::Tensor& out = run.outputs[j].toTensor();
      if (!out.defined() || !out.requires_grad()) continue;
      // A view made without grad mode: it says so because its base does.
      if (!torch::autograd::impl::gradient_edge(out).function) continue;
      at::Tensor grad = grad_of(step.output_grads[j]);
      if (!grad.defined()) {
        if (step.stage + 1 != pipe.num_stages() || j != plan.loss_port) continue;
        grad = at::ones_like(out, at::MemoryFormat::Preserve);
      }
      outputs.push_back(out);
      grads.push_back(std::move(grad));
    }
    run.grads = stage_backward(outputs, grads, *run.boundary, seeds);
    for (size_t p = 0; p < replicated.size(); ++p) {
      if (auto place = place_of(p); place && run.grads[*place].defined()) replicated[p] = run.grads[*place];
    }
  }
  add_to_copies(pipe, replicated);
  std::vector<at::Tensor> input_grads;
  for (const auto& ref : plan.input_grads) input_grads.push_back(grad_of(ref));
  runs.clear();
  return input_grads;
}

}  // namespace plumb
