#include "plumb/pipeline/runtime/stage_costs.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>

#include "plumb/autograd/recompute/live_bytes.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/capture/module_state_guard.h"
#include "plumb/core/error.h"
#include "plumb/partition/cost.h"
#include "plumb/pipeline/runtime/graph_stage.h"

namespace plumb {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Returns the time when the stage's device has done what it was asked to.
double done_by(GraphStage& stage) {
  const auto device = stage.device();
  if (device && !device->is_cpu() && !device->is_meta()) {
    const c10::impl::VirtualGuardImpl guard(device->type());
    guard.synchronizeStream(guard.getStream(*device));
  }
  return now();
}

// Puts the buffers and gradients of a pipe's stages, and the random state, back at the end of its scope.
class PipeStateGuard {
 public:
  explicit PipeStateGuard(const Pipe& pipe) : pipe_(pipe) {
    for (int s = 0; s < pipe.num_stages(); s++) {
      const State& state = pipe.stage(s)->state();
      guards_.push_back(std::make_unique<ModuleStateGuard>(state, std::vector<c10::IValue>()));
      for (const Attr& attr : state) {
        if (attr.kind == AttrKind::Buffer && attr.tensor.defined()) guards_.back()->before_write(attr.tensor);
      }
    }
    drop_gradients();
  }
  void drop_gradients() {
    for (const at::Tensor& parameter : pipe_.parameters()) parameter.mutable_grad() = at::Tensor();
  }

 private:
  const Pipe& pipe_;
  std::vector<std::unique_ptr<ModuleStateGuard>> guards_;
};

struct Best {
  double forward = std::numeric_limits<double>::infinity(), input = forward, weight = forward, full = forward;
  int64_t activation = 0, held = 0;
};

struct Ran {
  Tensors outputs;         // for later stages: memory of their own
  Tensors handles, grads;  // for the backward
  double seconds = 0;
  int64_t activation = 0;
};

Ran run_forward(GraphStage& stage, InputBoundary& boundary, const LiveBytes& meter) {
  Ran ran;
  const int64_t before = meter.live();
  const double begin = done_by(stage);
  std::optional<CheapRecompute> recompute;
  if (stage.recompute == Recompute::Cheap) recompute.emplace();
  Tensors outputs = stage.forward(boundary.inputs());
  if (recompute) recompute->finish();
  recompute.reset();
  ran.seconds = done_by(stage) - begin;
  int64_t kept = 0;
  for (auto& out : outputs) {
    at::Tensor copy;
    if (out.defined()) {
      at::NoGradGuard no_grad;
      copy = out.detach().clone();
      kept += static_cast<int64_t>(copy.nbytes());
    }
    ran.outputs.push_back(copy);
    if (!out.defined() || !out.requires_grad()) continue;
    ran.handles.push_back(backward_handle(out));
    ran.grads.push_back(at::ones_like(copy));
    kept += static_cast<int64_t>(copy.nbytes());
  }
  outputs.clear();
  boundary.release_inputs();
  ran.activation = std::max<int64_t>(0, meter.live() - before - kept);
  return ran;
}

double message_seconds(const Pipe& pipe, int stage, const StageCostOptions& options) {
  double bytes = 0;
  for (const StageOutputPort& port : pipe.stage_outputs(stage)) {
    if (!port.consumers.empty()) bytes += static_cast<double>(bytes_of(port.meta));
  }
  return options.seconds_per_message + bytes / options.bytes_per_second;
}

double resident_bytes(const Pipe& pipe, int stage, const StageCostOptions& options) {
  double bytes = 0;
  for (const Attr& attr : pipe.stage(stage)->state()) {
    const bool trained = attr.kind == AttrKind::Parameter && attr.tensor.requires_grad();
    bytes += static_cast<double>(attr.tensor.nbytes()) * (trained ? options.bytes_per_parameter_byte : 1);
  }
  return bytes;
}

StageCosts empty_costs() { return {{.forward = {}, .input = {}, .weight = {}, .communication = {}}, {}}; }

}  // namespace

StageCosts measure_stages(const Pipe& pipe, const std::vector<c10::IValue>& inputs, const StageCostOptions& options) {
  PipeStateGuard state_guard(pipe);
  const LiveBytes meter;
  c10::AutoGradMode grad_mode(true);
  std::vector<Best> best(pipe.num_stages());
  for (int repeat = 0; repeat < std::max(1, options.repeats); repeat++) {
    std::vector<Tensors> made;
    for (int s = 0; s < pipe.num_stages(); s++) {
      GraphStage stage(pipe.stage(s), pipe.table(), s);
      Tensors values;
      std::vector<bool> wants;
      for (const StageInputPort& port : pipe.stage_inputs(s)) {
        if (port.source.is_model_input()) {
          const c10::IValue& value = inputs.at(port.source.index);
          values.push_back(value.isTensor() ? value.toTensor() : value.isNone() ? at::Tensor() : pack_value(value));
          wants.push_back(false);
        } else {
          values.push_back(made[port.source.stage][port.source.index]);
          wants.push_back(true);
        }
      }
      Best& b = best[s];
      {
        InputBoundary boundary(values, wants);
        Ran ran = run_forward(stage, boundary, meter);
        const double begin = done_by(stage);
        stage_backward(ran.handles, ran.grads, boundary);
        b.full = std::min(b.full, done_by(stage) - begin);
        b.forward = std::min(b.forward, ran.seconds);
        b.activation = std::max(b.activation, ran.activation);
      }
      state_guard.drop_gradients();
      InputBoundary boundary(values, wants);
      Ran ran = run_forward(stage, boundary, meter);
      const int64_t before = meter.live();
      double begin = done_by(stage);
      InputHalf half = stage_backward_input(ran.handles, ran.grads, boundary);
      b.input = std::min(b.input, done_by(stage) - begin);
      int64_t returned = 0;
      for (const auto& g : half.input_grads) returned += g.defined() ? static_cast<int64_t>(g.nbytes()) : 0;
      b.held = std::max(b.held, ran.activation + meter.live() - before - returned);
      half.input_grads.clear();
      begin = done_by(stage);
      if (half.deferred.pending()) stage_backward_weight(half.deferred);
      b.weight = std::min(b.weight, done_by(stage) - begin);
      b.forward = std::min(b.forward, ran.seconds);
      state_guard.drop_gradients();
      made.push_back(std::move(ran.outputs));
    }
  }
  StageCosts result = empty_costs();
  double held = 0;
  for (int s = 0; s < pipe.num_stages(); s++) {
    const Best& b = best[s];
    result.costs.forward.push_back(b.forward);
    result.costs.input.push_back(b.input);
    result.costs.weight.push_back(b.weight);
    result.costs.full.push_back(b.full);
    result.costs.communication.push_back(message_seconds(pipe, s, options));
    result.costs.activation.push_back(static_cast<double>(b.activation));
    if (b.activation > 0) held = std::max(held, static_cast<double>(b.held) / static_cast<double>(b.activation));
    result.resident.push_back(resident_bytes(pipe, s, options));
  }
  result.costs.held_for_weight = std::clamp(held, 0.0, 1.0);
  return result;
}

StageCosts estimate_stages(const Pipe& pipe, const StageCostOptions& options) {
  StageCosts result = empty_costs();
  for (int s = 0; s < pipe.num_stages(); s++) {
    const GraphCost cost = estimate_cost(*pipe.stage(s), {}, options.machine);
    double bytes = 0;
    for (const NodeCost& node : cost.nodes) bytes += static_cast<double>(node.output_bytes);
    result.costs.forward.push_back(cost.forward());
    result.costs.input.push_back(cost.backward() / 2);
    result.costs.weight.push_back(cost.backward() / 2);
    result.costs.communication.push_back(message_seconds(pipe, s, options));
    result.costs.activation.push_back(bytes);
    result.resident.push_back(resident_bytes(pipe, s, options));
  }
  return result;
}

std::vector<c10::IValue> example_inputs(const GraphModule& module) {
  std::vector<c10::IValue> inputs;
  for (const Node* node : module.graph().placeholders()) {
    const Value* value = node->result();
    const auto& meta = value->meta();
    if (value->type() != ValueType::Tensor || !meta) {
      throw Error(ErrorKind::InvalidArgument, "the sizes of input '" + value->name() + "' are not known", "",
                  "capture or export the model with example inputs");
    }
    const auto options = at::TensorOptions(meta->dtype).device(meta->device);
    inputs.emplace_back(meta->is_floating_point() ? at::randn(meta->sizes, options) : at::zeros(meta->sizes, options));
  }
  return inputs;
}

}  // namespace plumb
