#include "plumb/partition/pipe.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "plumb/autograd/stage_backward.h"
#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/partition/wire.h"

namespace plumb {
namespace {

// Returns a stage's inputs, from the flat inputs and the earlier stages' outputs.
std::vector<c10::IValue> gather(const StageIO& io, const std::vector<c10::IValue>& inputs,
                                const std::vector<std::vector<c10::IValue>>& made) {
  std::vector<c10::IValue> values;
  values.reserve(io.inputs.size());
  for (const StageInputPort& in : io.inputs) {
    c10::IValue value = in.source.is_model_input() ? inputs[in.source.index] : made[in.source.stage][in.source.index];
    // Stages may live on different devices.
    if (in.meta && value.isTensor() && value.toTensor().defined() && value.toTensor().device() != in.meta->device) {
      value = value.toTensor().to(in.meta->device);
    }
    values.push_back(std::move(value));
  }
  return values;
}

}  // namespace

Pipe::Pipe(std::vector<std::shared_ptr<GraphModule>> stages, PipeTable table, Graph whole, std::vector<Origin> origins,
           TreeSpec in_spec, TreeSpec out_spec, std::vector<std::string> notes)
    : stages_(std::move(stages)),
      table_(std::move(table)),
      whole_(std::make_shared<Graph>(std::move(whole))),
      origins_(std::move(origins)),
      in_spec_(std::move(in_spec)),
      out_spec_(std::move(out_spec)),
      notes_(std::move(notes)) {
  for (const Node* in : whole_->placeholders()) {
    input_names_.push_back(in->target());
    input_metas_.push_back(in->result()->meta());
  }
  if (table_.loss_output && !table_.outputs.at(*table_.loss_output).port) {
    throw Error(ErrorKind::InvalidState, "the loss is a constant", "", "mark a tensor among the outputs as the loss");
  }
}

void Pipe::check_stage(int index) const {
  if (index >= 0 && index < num_stages()) return;
  throw Error(ErrorKind::InvalidArgument, str("the pipe has no stage ", index, ", it has ", num_stages()), "",
              "stages count from 0");
}

const std::shared_ptr<GraphModule>& Pipe::stage(int index) const {
  check_stage(index);
  return stages_[index];
}

const std::vector<StageInputPort>& Pipe::stage_inputs(int index) const {
  check_stage(index);
  return table_.stages[index].inputs;
}

const std::vector<StageOutputPort>& Pipe::stage_outputs(int index) const {
  check_stage(index);
  return table_.stages[index].outputs;
}

std::vector<c10::IValue> Pipe::outputs_of(std::vector<c10::IValue>& last) const {
  std::vector<c10::IValue> outputs;
  for (const PipelineOutput& out : table_.outputs) outputs.push_back(out.port ? last[*out.port] : out.constant);
  return outputs;
}

std::vector<c10::IValue> Pipe::run_stages(const std::vector<c10::IValue>& inputs,
                                          const std::map<int, State>& joined) const {
  if (inputs.size() != table_.num_inputs) {
    throw Error(ErrorKind::StructureMismatch,
                str("the pipe takes ", table_.num_inputs, " inputs, got ", inputs.size()));
  }
  std::vector<std::vector<c10::IValue>> made(stages_.size());
  std::set<ValueSource> crossed;
  for (size_t s = 0; s < stages_.size(); ++s) {
    for (const StageInputPort& in : table_.stages[s].inputs) {
      if (!table_.crosses_rounded(in.source)) continue;
      c10::IValue& value = made[in.source.stage][in.source.index];
      const bool first = crossed.insert(in.source).second;
      if (value.isTensor())
        value = over_the_wire(value.toTensor(), {first ? table_.wire.fwd : "none", table_.wire.bwd});
    }
    std::vector<c10::IValue> values = gather(table_.stages[s], inputs, made);
    const auto own = joined.find(static_cast<int>(s));
    made[s] = own == joined.end() ? stages_[s]->run(std::move(values))
                                  : Plan(stages_[s]->graph(), own->second).run(std::move(values));
    // A value whose last user has run is of no use any more.
    for (const StageInputPort& in : table_.stages[s].inputs) {
      if (in.source.is_model_input()) continue;
      const auto& uses = table_.stages[in.source.stage].outputs[in.source.index].consumers;
      if (uses.back().stage == static_cast<int>(s)) made[in.source.stage][in.source.index] = c10::IValue();
    }
  }
  return outputs_of(made.back());
}

std::vector<c10::IValue> Pipe::run(std::vector<c10::IValue> inputs) const { return run_stages(inputs, {}); }

Pipe Pipe::with_stages(std::vector<std::shared_ptr<GraphModule>> stages) const {
  if (stages.size() != stages_.size()) {
    throw Error(ErrorKind::StructureMismatch, str("the pipe has ", num_stages(), " stages, got ", stages.size()));
  }
  if (std::ranges::any_of(stages, [](const auto& stage) { return !stage; }))
    throw Error(ErrorKind::InvalidArgument, "a stage of the pipe is a null pointer", "", "give it every stage's graph");
  Pipe other = *this;
  other.stages_ = std::move(stages);
  return other;
}

c10::IValue Pipe::forward(std::vector<c10::IValue> args,
                          std::vector<std::pair<std::string, c10::IValue>> kwargs) const {
  // A module that only returns its inputs takes the structured call apart and checks it as every module does.
  Graph graph;
  std::vector<Arg> leaves;
  for (size_t i = 0; i < input_names_.size(); ++i)
    leaves.push_back(graph.placeholder(input_names_[i], input_metas_[i])->result());
  graph.output(std::move(leaves));
  GraphModule taker(std::move(graph), State(), in_spec_,
                    TreeSpec::tuple(std::vector<TreeSpec>(input_names_.size(), TreeSpec::leaf())));
  return unflatten(out_spec_, run(taker.forward(std::move(args), std::move(kwargs)).toTupleRef().elements().vec()));
}

std::vector<at::Tensor> Pipe::parameters() const {
  std::vector<at::Tensor> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& stage : stages_) {
    for (const Attr& attr : stage->state()) {
      if (attr.kind == AttrKind::Parameter && attr.tensor.defined() &&
          seen.insert(attr.tensor.unsafeGetTensorImpl()).second) {
        found.push_back(attr.tensor);
      }
    }
  }
  return found;
}

void Pipe::train(bool on) {
  for (const auto& stage : stages_) stage->train(on);
}

// Adds the gradient of a parameter to each of its copies.
void Pipe::add_to_copies(const ReplicatedParam& copies, const at::Tensor& grad) const {
  at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> given;  // copies may be one tensor
  for (const auto& [s, name] : copies) {
    at::Tensor param = stages_[s]->state().get(name).tensor;
    if (!given.insert(param.unsafeGetTensorImpl()).second) continue;
    const at::Tensor sum = grad.to(param.device());
    param.mutable_grad() = param.grad().defined() ? param.grad() + sum : sum.clone();
  }
}

BackwardResult Pipe::run_with_backward(std::vector<c10::IValue> inputs) const {
  if (!has_loss_and_backward()) {
    throw Error(ErrorKind::InvalidState, "the pipe has no loss and so no backward", "", "give SplitOptions::loss_spec");
  }
  // All stages are one to autograd. Its graph begins at the inputs and at the parameters that several stages hold.
  Tensors entering;
  for (const c10::IValue& v : inputs) entering.push_back(v.isTensor() ? v.toTensor() : at::Tensor());
  for (const ReplicatedParam& copies : table_.replicated) {
    at::Tensor& first = entering.emplace_back();
    for (const auto& [s, name] : copies) {
      const at::Tensor& own = stages_[s]->state().get(name).tensor;
      if (!first.defined() && own.requires_grad()) first = own;
    }
  }
  std::vector<bool> asks;
  for (const at::Tensor& tensor : entering) asks.push_back(tensor.defined() && tensor.requires_grad());
  const InputBoundary boundary(entering, asks);
  const size_t count = inputs.size();
  for (size_t i = 0; i < count; ++i) {
    if (inputs[i].isTensor()) inputs[i] = boundary.inputs()[i];
  }
  std::map<int, State> joined;
  for (size_t p = 0; p < table_.replicated.size(); ++p) {
    for (const auto& [s, name] : table_.replicated[p]) {
      const at::Tensor own = stages_[s]->state().get(name).tensor;
      if (!own.requires_grad()) continue;
      at::Tensor copy = own.tensor_data();  // its own values, the gradient's way the same as that of the others
      const at::Tensor there = boundary.inputs()[count + p].to(own.device());
      torch::autograd::impl::set_gradient_edge(copy, torch::autograd::impl::gradient_edge(there));
      State& state = joined.try_emplace(s, stages_[s]->state()).first->second;
      for (const Attr& attr : stages_[s]->state()) {
        if (attr.tensor.is_same(own)) state.set(attr.name, copy);
      }
    }
  }
  BackwardResult result;
  result.outputs = run_stages(inputs, joined);
  const c10::IValue& loss = result.outputs[*table_.loss_output];
  if (!loss.isTensor() || !loss.toTensor().defined() || !loss.toTensor().requires_grad() ||
      loss.toTensor().numel() != 1) {
    throw Error(ErrorKind::TensorMismatch,
                "the loss, output %" + table_.stages.back().outputs[*table_.outputs[*table_.loss_output].port].name +
                    ", is no tensor of one element that requires a gradient");
  }
  result.input_grads = stage_backward({loss.toTensor()}, {}, boundary);
  for (size_t p = 0; p < table_.replicated.size(); ++p) {
    if (result.input_grads[count + p].defined()) add_to_copies(table_.replicated[p], result.input_grads[count + p]);
  }
  result.input_grads.resize(count);
  return result;
}

State Pipe::merge_state_dict() const {
  for (const ReplicatedParam& param : table_.replicated) {
    const auto& [first_stage, first_name] = *param.begin();
    const at::Tensor& first = stages_[first_stage]->state().get(first_name).tensor;
    for (const auto& [s, name] : param) {
      const at::Tensor& copy = stages_[s]->state().get(name).tensor;
      if (first.is_meta() || copy.is_meta()) continue;
      // Bytes, so that a NaN equals itself.
      const auto a = first.detach().cpu().contiguous(), b = copy.detach().cpu().contiguous();
      if (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
          (a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0))
        continue;
      throw Error(ErrorKind::InvalidState,
                  str("the copies of '", first_name, "' in stage ", first_stage, " and of '", name, "' in stage ", s,
                      " differ"),
                  "", "sum the gradients of replicated_params() over their stages before every optimizer step");
    }
  }
  State merged;
  for (const Origin& origin : origins_) {
    at::Tensor tensor = origin.stage < 0 ? origin.tensor : stages_[origin.stage]->state().get(origin.held_as).tensor;
    merged.add({origin.name, origin.kind, std::move(tensor), origin.persistent});
  }
  return merged;
}

std::shared_ptr<GraphModule> Pipe::merge() const {
  auto module = std::make_shared<GraphModule>(whole_->clone(), merge_state_dict(), in_spec_, out_spec_);
  module->copy_mode(*stages_.front());
  return module;
}

std::string Pipe::stage_text(int index) const {
  check_stage(index);
  return to_string(stages_[index]->graph());
}

std::string Pipe::print_readable() const {
  std::string text = str("pipe of ", num_stages(), " stages\n");
  for (const Node* in : whole_->placeholders())
    text += "  %" + in->result()->name() + " = placeholder \"" + in->target() + "\"\n";
  const auto name = [](const auto& port) { return "%" + port.name; };
  for (int s = 0; s < num_stages(); ++s) {
    const auto& [inputs, outputs] = table_.stages[s];
    text += str("  ", join(outputs, name), outputs.empty() ? "" : " = ", "stage_", s, "(", join(inputs, name), ")\n");
  }
  text += table_.to_string();
  for (const std::string& note : notes_) text += "note: " + note + "\n";
  for (int s = 0; s < num_stages(); ++s) text += str("stage ", s, " ", stage_text(s));
  return text;
}

}  // namespace plumb
