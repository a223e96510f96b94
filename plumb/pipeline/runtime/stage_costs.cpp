#include "plumb/pipeline/runtime/stage_costs.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler.h>

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "plumb/autograd/recompute/live_bytes.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/capture/module_state_guard.h"
#include "plumb/core/cores.h"
#include "plumb/core/error.h"
#include "plumb/partition/cost.h"
#include "plumb/pipeline/runtime/graph_stage.h"

namespace plumb {
namespace {

// Returns the time when the stage's device has done what it was asked to: of a CPU this thread's processor time.
double done_by(GraphStage& stage) {
  const auto device = stage.device();
  if (device && !device->is_cpu() && !device->is_meta()) {
    const c10::impl::VirtualGuardImpl guard(device->type());
    guard.synchronizeStream(guard.getStream(*device));
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Keeps cores at work in the place of the other ranks: arithmetic on more memory than a core's own caches hold.
class BusyRanks {
 public:
  explicit BusyRanks(int ranks) {
    for (int i = 1; i < std::min(ranks, num_cores()); i++) threads_.emplace_back([this] { work(); });
  }
  ~BusyRanks() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  BusyRanks(const BusyRanks&) = delete;

 private:
  void work() const {
    constexpr size_t kAll = size_t{1} << 21, kPart = size_t{1} << 15;  // 8 MiB, 128 KiB
    std::vector<float> x(kAll, 1.0F), y(kAll, 0.0F);
    for (size_t begin = 0; !stop_; begin = (begin + kPart) % kAll) {
      for (int repeat = 0; repeat < 8; repeat++) {
        for (size_t i = begin; i < begin + kPart; i++) y[i] = 0.5F * y[i] + x[i];
      }
    }
  }
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> threads_;
};

// Drops the gradients of a pipe's stages, and puts them, the buffers and the random state back at the end of its scope.
class PipeStateGuard {
 public:
  explicit PipeStateGuard(const Pipe& pipe) {
    for (int s = 0; s < pipe.num_stages(); s++) {
      const State& state = pipe.stage(s)->state();
      guards_.push_back(std::make_unique<ModuleStateGuard>(state, std::vector<c10::IValue>()));
      for (const Attr& attr : state) {
        if (attr.kind == AttrKind::Buffer && attr.tensor.defined()) guards_.back()->before_write(attr.tensor);
      }
    }
    for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<std::unique_ptr<ModuleStateGuard>> guards_;
};

// A stage's measured times, a number a run, and bytes.
struct Measured {
  std::vector<double> forward, input, weight, full;
  int64_t activation = 0, held = 0, working = 0;
};

double least(const std::vector<double>& times) { return *std::ranges::min_element(times); }

double middle(std::vector<double> times) {
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, at);
  return *at;
}

// One microbatch in one stage.
class Run {
 public:
  // Values of other stages are copied, as if they had come in a message, and so are gradients; an action's seconds have
  // the copies of what comes to it and of what it makes. `loss`: of the last stage, or null.
  Run(const Pipe& pipe, int index, GraphStage& stage, const std::vector<c10::IValue>& inputs,
      const std::vector<Tensors>& made, const std::function<at::Tensor(const Tensors&)>* loss, LiveBytes& meter)
      : stage_(stage), meter_(meter), before_(meter.live()) {
    Tensors values;
    std::vector<bool> wants;
    for (const StageInputPort& port : pipe.stage_inputs(index)) {
      wants.push_back(!port.source.is_model_input());
      if (port.source.is_model_input()) {
        const c10::IValue& value = inputs.at(port.source.index);
        values.push_back(value.isTensor() ? value.toTensor() : value.isNone() ? at::Tensor() : pack_value(value));
      } else {
        const at::Tensor& value = made[port.source.stage][port.source.index];
        forward_seconds_ += seconds_of([&] { values.push_back(value.defined() ? value.clone() : value); });
      }
    }
    boundary_.emplace(values, wants);
    values.clear();
    forward(loss);
  }

  // Adds what the forward took, and the backward whole or in halves.
  void backward(bool halves, Measured& measured) {
    measured.forward.push_back(forward_seconds_);
    measured.activation = std::max(measured.activation, activation_);
    if (halves) {
      measured.input.push_back(input_half());
      measured.held = std::max(measured.held, held_);
      measured.weight.push_back(weight_half());
    } else {
      measured.full.push_back(timed([&] { stage_backward(handles_, gradients(), *boundary_); }));
      measured.working = working_;  // the last run's: the first one makes the gradients
    }
  }

  Tensors outputs;  // for later stages: memory of their own

 private:
  // Gradients come with the backward; the weight half may hold some until its turn.
  Tensors gradients() const {
    Tensors made;
    for (const at::Tensor& of : with_gradient_) made.push_back(at::ones_like(of));
    return made;
  }
  double input_half() {
    const int64_t before = meter_.live();
    const double seconds = timed([&] { half_ = stage_backward_input(handles_, gradients(), *boundary_); });
    int64_t returned = 0;
    for (const auto& g : half_.input_grads) returned += g.defined() ? static_cast<int64_t>(g.nbytes()) : 0;
    handles_.clear();
    held_ = activation_ + meter_.live() - before - returned;
    half_.input_grads.clear();
    return seconds;
  }
  double weight_half() {
    return timed([&] {
      if (half_.deferred.pending()) stage_backward_weight(half_.deferred);
    });
  }
  template <class Function>
  double seconds_of(const Function& function) {
    const double begin = done_by(stage_);
    function();
    return done_by(stage_) - begin;
  }
  template <class Function>
  double timed(const Function& function) {
    const int64_t before = meter_.live();
    meter_.restart_peak();
    const double seconds = seconds_of(function);
    working_ = std::max(working_, meter_.peak() - std::max(before, meter_.live()));
    return seconds;
  }
  void forward(const std::function<at::Tensor(const Tensors&)>* loss) {
    Tensors results;
    forward_seconds_ += timed([&] {
      std::optional<CheapRecompute> recompute;
      if (stage_.recompute == Recompute::Cheap) recompute.emplace();
      results = stage_.forward(boundary_->inputs());
      if (recompute) recompute->finish();
      recompute.reset();
      if (loss != nullptr) results = {(*loss)(results)};
    });
    int64_t kept = 0;
    for (auto& out : results) {
      at::Tensor copy;
      if (out.defined()) {
        at::NoGradGuard no_grad;
        forward_seconds_ += seconds_of([&] { copy = out.detach().clone(); });
        kept += static_cast<int64_t>(copy.nbytes());
      }
      outputs.push_back(copy);
      if (!out.defined() || !out.requires_grad()) continue;
      handles_.push_back(backward_handle(out));
      with_gradient_.push_back(copy);
    }
    results.clear();
    boundary_->release_inputs();
    activation_ = std::max<int64_t>(0, meter_.live() - before_ - kept);
  }

  GraphStage& stage_;
  LiveBytes& meter_;
  const int64_t before_;
  std::optional<InputBoundary> boundary_;
  Tensors handles_, with_gradient_;  // for the backward: of outputs that want a gradient
  InputHalf half_;
  double forward_seconds_ = 0;
  int64_t activation_ = 0;  // bytes that wait for the backward
  int64_t held_ = 0;        // and after the input half
  int64_t working_ = 0;     // the most that an action took besides what there was before or after
};

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

StageCosts empty_costs() { return {{.forward = {}, .input = {}, .weight = {}, .communication = {}}, {}, {}, 0}; }

StageCosts costs_of(const Pipe& pipe, const std::vector<Measured>& measured, const StageCostOptions& options) {
  StageCosts result = empty_costs();
  double least_sum = 0, middle_sum = 0;
  result.costs.held_for_weight.clear();
  for (int s = 0; s < pipe.num_stages(); s++) {
    const Measured& m = measured[s];
    result.costs.forward.push_back(middle(m.forward));
    result.costs.input.push_back(middle(m.input));
    result.costs.weight.push_back(middle(m.weight));
    result.costs.full.push_back(middle(m.full));
    for (const auto* times : {&m.forward, &m.input, &m.weight, &m.full}) {
      least_sum += least(*times);
      middle_sum += middle(*times);
    }
    result.costs.communication.push_back(message_seconds(pipe, s, options));
    result.costs.activation.push_back(static_cast<double>(m.activation));
    const auto held = static_cast<double>(std::max<int64_t>(0, m.held));
    result.costs.held_for_weight.push_back(m.activation > 0 ? held / static_cast<double>(m.activation) : 1);
    result.resident.push_back(resident_bytes(pipe, s, options));
    result.working.push_back(static_cast<double>(m.working));
  }
  result.spread = least_sum > 0 ? middle_sum / least_sum - 1 : 0;
  return result;
}

}  // namespace

StageCosts measure_stages(const Pipe& pipe, const std::vector<c10::IValue>& inputs, const StageCostOptions& options) {
  PipeStateGuard state_guard(pipe);
  const BusyRanks busy(options.busy_ranks);
  LiveBytes meter;
  c10::AutoGradMode grad_mode(true);
  std::vector<Measured> measured(pipe.num_stages());
  std::vector<std::unique_ptr<GraphStage>> stages;
  for (int s = 0; s < pipe.num_stages(); s++) {
    stages.push_back(std::make_unique<GraphStage>(pipe.stage(s), pipe.table(), s));
    if (!options.recompute.empty()) stages.back()->recompute = options.recompute.at(static_cast<size_t>(s));
  }
  // As in a step, stages take turns and gradients are added to those of earlier microbatches.
  for (int repeat = 0; repeat < std::max(1, options.repeats); repeat++) {
    for (const bool halves : {false, true}) {
      std::vector<Tensors> made;
      std::vector<std::unique_ptr<Run>> runs;
      for (int s = 0; s < pipe.num_stages(); s++) {
        const auto* loss = options.loss && s + 1 == pipe.num_stages() ? &options.loss : nullptr;
        runs.push_back(std::make_unique<Run>(pipe, s, *stages[s], inputs, made, loss, meter));
        made.push_back(runs.back()->outputs);
      }
      for (int s = pipe.num_stages() - 1; s >= 0; s--) {
        runs[s]->backward(halves, measured[s]);
        runs[s].reset();
      }
    }
  }
  return costs_of(pipe, measured, options);
}

StageCosts estimate_stages(const Pipe& pipe, const StageCostOptions& options) {
  StageCosts result = empty_costs();
  for (int s = 0; s < pipe.num_stages(); s++) {
    const GraphCost cost = estimate_cost(*pipe.stage(s), {}, options.machine);
    double bytes = 0, loss = 0;
    for (const NodeCost& node : cost.nodes) bytes += static_cast<double>(node.output_bytes);
    if (options.loss && s + 1 == pipe.num_stages()) {
      // It reads the outputs about three times forward, and as often backward; it keeps one copy.
      double outputs = 0;
      for (const StageOutputPort& port : pipe.stage_outputs(s)) outputs += static_cast<double>(bytes_of(port.meta));
      loss = 3 * outputs / options.machine.bytes_per_second;
      bytes += outputs;
    }
    result.costs.forward.push_back(cost.forward() + loss);
    result.costs.input.push_back(cost.backward() / 2 + loss);
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
