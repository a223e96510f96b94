#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <set>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/graph/plan.h"
#include "plumb/partition/backward.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/wire.h"

namespace plumb {
namespace {

using FunctionPtr = decltype(torch::autograd::Edge::function);  // shared or intrusive, by torch's version

// Stands where a stage's graph begins: the sum of what flows into it is the value's gradient. A tensor behind it is no
// leaf, so a stage may begin with an in-place operator.
struct StageEdge : torch::autograd::Node {
  at::Tensor grad;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    grad = grads.empty() ? at::Tensor() : std::move(grads[0]);
    return {};
  }
  std::string name() const override { return "plumb::StageEdge"; }
};

template <typename Pointer>
Pointer make_edge() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<StageEdge>();
  } else {
    return c10::make_intrusive<StageEdge>();
  }
}

struct Entry {
  FunctionPtr edge;   // null: no gradient
  at::Tensor tensor;  // what the stage is called with
  at::Tensor grad() const { return edge ? static_cast<StageEdge&>(*edge).grad : at::Tensor(); }
};

Entry enter(const at::Tensor& value) {
  if (!value.defined() || !value.requires_grad()) return {{}, value};
  Entry entry{make_edge<FunctionPtr>(), value.detach()};
  const uint32_t slot = entry.edge->add_input_metadata(entry.tensor);
  torch::autograd::impl::set_gradient_edge(entry.tensor, {entry.edge, slot});
  return entry;
}

struct StageRun {
  std::vector<Entry> inputs;
  std::map<std::string, Entry> shared;  // replicated parameters, by name here
  std::vector<c10::IValue> outputs;
};

}  // namespace

struct DetachExecutor::State {
  const Pipe& pipe;
  std::vector<StageRun> runs;
  std::vector<c10::IValue> flat_inputs;
};

DetachExecutor::DetachExecutor(const Pipe& pipe) : state_(new State{pipe, {}, {}}) {}
DetachExecutor::~DetachExecutor() = default;

std::vector<c10::IValue> DetachExecutor::forward(std::vector<c10::IValue> inputs) {
  const Pipe& pipe = state_->pipe;
  const PipeTable& table = pipe.table();
  if (inputs.size() != table.num_inputs) {
    throw Error(ErrorKind::StructureMismatch,
                "the pipe takes " + std::to_string(table.num_inputs) + " inputs, got " + std::to_string(inputs.size()));
  }
  auto& runs = state_->runs;
  runs.clear();
  for (int s = 0; s < pipe.num_stages(); ++s) {
    StageRun run;
    std::vector<c10::IValue> values;
    for (const StageInputPort& in : table.stages[s].inputs) {
      c10::IValue v =
          in.source.is_pipeline_input() ? inputs[in.source.index] : runs[in.source.stage].outputs[in.source.index];
      if (table.crosses_rounded(in.source) && v.isTensor() && v.toTensor().defined()) {
        const bool asks = v.toTensor().requires_grad();
        v = over_the_wire(v.toTensor().detach(), table.wire).requires_grad_(asks);
      }
      run.inputs.push_back(v.isTensor() ? enter(v.toTensor()) : Entry{});
      values.push_back(v.isTensor() ? c10::IValue(run.inputs.back().tensor) : std::move(v));
    }
    GraphModule& stage = *pipe.stage(s);
    plumb::State with_edges = stage.state();
    for (const ReplicatedParam& param : table.replicated) {
      auto here = param.find(s);
      if (here == param.end() || !c10::GradMode::is_enabled()) continue;
      const at::Tensor own = stage.state().get(here->second).tensor;
      const Entry entry = enter(own);
      if (!entry.edge) continue;
      run.shared.emplace(here->second, entry);
      for (const Attr& attr : stage.state()) {
        if (attr.tensor.is_same(own)) with_edges.set(attr.name, entry.tensor);
      }
    }
    run.outputs =
        run.shared.empty() ? stage.run(std::move(values)) : Plan(stage.graph(), with_edges).run(std::move(values));
    runs.push_back(std::move(run));
  }
  state_->flat_inputs = std::move(inputs);
  std::vector<c10::IValue> outputs;
  for (const PipelineOutput& out : table.outputs)
    outputs.push_back(out.port ? runs.back().outputs[*out.port] : out.constant);
  return outputs;
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
    const at::Tensor grad = ref ? runs[ref->stage].inputs[ref->input].grad() : at::Tensor();
    if (!grad.defined() || !table.crosses_rounded(table.stages[ref->stage].inputs[ref->input].source)) return grad;
    at::NoGradGuard no_grad;
    return over_the_wire(grad, {table.wire.bwd, "none"});
  };
  // A replicated parameter's gradient so far, handed from a later stage's copy to an earlier one's: see
  // StageBackwardStep.
  std::vector<at::Tensor> replicated(pipe.replicated_params().size());
  for (const StageBackwardStep& step : plan.steps) {
    StageRun& run = runs[step.stage];
    torch::autograd::edge_list roots;
    torch::autograd::variable_list grads;
    auto add_root = [&](torch::autograd::Edge edge, at::Tensor grad) {
      roots.push_back(std::move(edge));
      grads.push_back(std::move(grad));
    };
    for (size_t i = 0; i < run.inputs.size(); ++i) {
      const at::Tensor seed = grad_of(step.input_seeds[i]);
      if (seed.defined() && run.inputs[i].edge) add_root({run.inputs[i].edge, 0}, seed);
    }
    for (size_t p = 0; p < replicated.size(); ++p) {
      auto here = pipe.replicated_params()[p].find(step.stage);
      if (here == pipe.replicated_params()[p].end() || !replicated[p].defined()) continue;
      if (auto it = run.shared.find(here->second); it != run.shared.end())
        add_root({it->second.edge, 0}, replicated[p]);
    }
    for (size_t j : step.outputs_with_grads) {
      if (!run.outputs[j].isTensor()) continue;
      const at::Tensor& out = run.outputs[j].toTensor();
      if (!out.defined() || !out.requires_grad()) continue;
      auto edge = torch::autograd::impl::gradient_edge(out);
      if (!edge.function) continue;  // a view made without grad mode: it says so because its base does
      at::Tensor grad = grad_of(step.output_grads[j]);
      if (!grad.defined()) {
        if (step.stage + 1 != pipe.num_stages() || j != plan.loss_port) continue;
        grad = at::ones_like(out, at::MemoryFormat::Preserve);
      }
      add_root(std::move(edge), std::move(grad));
    }
    if (roots.empty()) continue;
    torch::autograd::Engine::get_default_engine().execute(roots, grads, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
    for (size_t p = 0; p < replicated.size(); ++p) {
      auto here = pipe.replicated_params()[p].find(step.stage);
      if (here == pipe.replicated_params()[p].end()) continue;
      auto it = run.shared.find(here->second);
      if (it != run.shared.end() && it->second.grad().defined()) replicated[p] = it->second.grad();
    }
  }
  add_to_copies(pipe, replicated);
  std::vector<at::Tensor> input_grads;
  for (const auto& ref : plan.input_grads) input_grads.push_back(grad_of(ref));
  runs.clear();
  return input_grads;
}

}  // namespace plumb
