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
#include <numeric>
#include <optional>
#include <thread>

#include "plumb/autograd/recompute/live_bytes.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/core/cores.h"
#include "plumb/core/error.h"
#include "plumb/graph/module_state_guard.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/transport/host_rings.h"
#include "plumb/pipeline/transport/message.h"

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

void drop_gradients(const Pipe& pipe) {
  for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad() = at::Tensor();
}

// Drops the gradients of a pipe's stages. At the end of its scope these, what forwards write and the random state are
// as before.
class PipeStateGuard {
 public:
  explicit PipeStateGuard(const Pipe& pipe) {
    for (int s = 0; s < pipe.num_stages(); s++) {
      const GraphModule& stage = *pipe.stage(s);
      guards_.push_back(std::make_unique<ModuleStateGuard>(stage.state(), std::vector<c10::IValue>()));
      guards_.back()->keep_written(stage.graph(), stage.state());
    }
    drop_gradients(pipe);
  }

 private:
  std::vector<std::unique_ptr<ModuleStateGuard>> guards_;
};

// A stage's measured times, a number a run, and bytes.
struct Measured {
  struct Kind {
    std::vector<double> seconds;
    int64_t first = 0, working = 0;  // bytes besides those before or after: of the first run, the most of the others
    void add(double time, int64_t bytes) {
      if (seconds.empty()) first = bytes;
      working = seconds.size() < 2 ? bytes : std::max(working, bytes);
      seconds.push_back(time);
    }
  };
  Kind forward, input, weight, full;
  std::vector<double> copies;  // seconds of copying the outputs
  int64_t activation = 0, held = 0;
};

// Returns the mean without the longest eighth: runs that were disturbed, or the first. A step is a sum of runs, so its
// usual length is the sum of their means; their middles add up to some 2 % less.
double mean(std::vector<double> times) {
  const auto end = times.end() - static_cast<std::ptrdiff_t>((times.size() + 6) / 8);
  std::ranges::nth_element(times, end - 1);
  return std::accumulate(times.begin(), end, 0.0) / static_cast<double>(end - times.begin());
}

// One microbatch in one stage.
class Run {
 public:
  // Values of other stages are copied, as if they had come in a message, and so are gradients. `loss`: of the last
  // stage, or null.
  Run(const Pipe& pipe, int index, GraphStage& stage, const std::vector<c10::IValue>& inputs,
      const std::vector<Tensors>& made, const std::function<at::Tensor(const Tensors&)>* loss, LiveBytes& meter)
      : stage_(stage), meter_(meter), before_(meter.live()) {
    Tensors values;
    for (const StageInputPort& port : pipe.stage_inputs(index)) {
      from_stage_.push_back(!port.source.is_model_input());
      if (port.source.is_model_input()) {
        const c10::IValue& value = inputs.at(port.source.index);
        values.push_back(value.isTensor() ? value.toTensor() : value.isNone() ? at::Tensor() : pack_value(value));
      } else {
        values.push_back(made[port.source.stage][port.source.index]);
      }
    }
    receive(pipe.stage_inputs(index), values);
    boundary_.emplace(values, from_stage_);
    values.clear();
    forward(loss);
  }

  // Adds what the forward took, and the backward whole or its input half.
  void backward(bool halves, Measured& measured) {
    measured.forward.add(forward_seconds_, forward_working_);
    measured.copies.push_back(copy_seconds_);
    measured.activation = std::max(measured.activation, activation_);
    const int64_t before = meter_.live();
    Tensors grads;  // for outputs that want one; the weight half may hold some until its turn
    for (const at::Tensor& of : with_gradient_) grads.push_back(at::ones_like(of));
    const auto done = [&] {
      grads.clear();
      handles_.clear();
      if (!halves) boundary_.reset();
    };
    if (!halves) return add(measured.full, before, [&] { return stage_backward(handles_, grads, *boundary_); }, done);
    const auto input = [&] {
      half_ = stage_backward_input(handles_, grads, *boundary_);
      return std::exchange(half_.input_grads, {});
    };
    add(measured.input, before, input, done);
    measured.held = std::max(measured.held, activation_ + meter_.live() - before);
  }
  void weight_half(Measured& measured) {
    const auto weight = [&] {
      if (half_.deferred.pending()) stage_backward_weight(half_.deferred);
      return Tensors();
    };
    add(measured.weight, meter_.live(), weight, [&] {
      half_ = {};
      boundary_.reset();
    });
  }

  Tensors outputs;  // for later stages: memory of their own

 private:
  // Copies what comes from other stages. A stage's message is one piece of memory on the CPU.
  static void receive(const std::vector<StageInputPort>& ports, Tensors& values) {
    const at::NoGradGuard no_grad;
    std::map<int, std::vector<size_t>> messages;
    for (size_t i = 0; i < values.size(); ++i) {
      if (ports[i].source.is_model_input() || !values[i].defined()) continue;
      if (values[i].is_cpu() && values[i].is_contiguous()) {
        messages[ports[i].source.stage].push_back(i);
      } else {
        values[i] = values[i].clone();
      }
    }
    for (const auto& [stage, inputs] : messages) {
      constexpr int64_t kAlign = 64;
      const auto space = [&](size_t i) { return (static_cast<int64_t>(values[i].nbytes()) + kAlign - 1) & -kAlign; };
      int64_t bytes = 0;
      for (const size_t i : inputs) bytes += space(i);
      const at::Tensor memory = at::empty({bytes}, at::kByte);
      int64_t begin = 0;
      for (const size_t i : inputs) {
        const at::Tensor part = memory.narrow(0, std::exchange(begin, begin + space(i)), values[i].nbytes());
        values[i] = part.view(values[i].scalar_type()).view(values[i].sizes()).copy_(values[i]);
      }
    }
  }
  template <class Function>
  double seconds_of(const Function& function) {
    const double begin = done_by(stage_);
    function();
    return done_by(stage_) - begin;
  }
  // `before`: bytes before its message came. `done` lets go of what an action leaves and its stage does not keep.
  template <class Function, class Done>
  void add(Measured::Kind& kind, int64_t before, const Function& function, const Done& done) {
    meter_.restart_peak();
    int64_t peak = 0;
    // To give memory back to the system takes its time, too.
    const double seconds = seconds_of([&] {
      Tensors input_grads = function();
      peak = meter_.peak();
      input_grads.clear();
      done();
    });
    kind.add(seconds, peak - std::max(before, meter_.live()));
  }
  void forward(const std::function<at::Tensor(const Tensors&)>* loss) {
    Tensors results;
    meter_.restart_peak();
    forward_seconds_ += seconds_of([&] {
      std::optional<CheapRecompute> recompute;
      if (stage_.recompute == Recompute::Cheap) recompute.emplace();
      results = stage_.forward(boundary_->inputs());
      if (recompute) recompute->finish();
      recompute.reset();
      if (loss != nullptr) results = {(*loss)(results)};
    });
    const int64_t peak = meter_.peak();
    int64_t kept = 0;
    for (auto& out : results) {
      at::Tensor copy;
      if (out.defined()) {
        at::NoGradGuard no_grad;
        copy_seconds_ += seconds_of([&] { copy = out.detach().clone(); });
        kept += static_cast<int64_t>(copy.nbytes());
      }
      outputs.push_back(copy);
      if (!out.defined() || !out.requires_grad()) continue;
      handles_.push_back(backward_handle(out));
      with_gradient_.push_back(copy);
    }
    forward_seconds_ += seconds_of([&] {
      results.clear();
      boundary_->release_inputs();
    });
    activation_ = std::max<int64_t>(0, meter_.live() - before_ - kept);
    forward_working_ = peak - before_ - activation_;
  }

  GraphStage& stage_;
  LiveBytes& meter_;
  const int64_t before_;
  std::vector<bool> from_stage_;  // by input: another stage's value
  std::optional<InputBoundary> boundary_;
  Tensors handles_, with_gradient_;  // for the backward: of outputs that want a gradient
  InputHalf half_;
  double forward_seconds_ = 0, copy_seconds_ = 0;
  int64_t activation_ = 0;  // bytes that wait for the backward
  int64_t forward_working_ = 0;
};

int64_t message_bytes(const Pipe& pipe, int stage) {
  int64_t bytes = 0;
  for (const StageOutputPort& port : pipe.stage_outputs(stage)) {
    if (!port.consumers.empty()) bytes += bytes_of(port.meta);
  }
  return bytes;
}

// Adds what was measured to the known costs.
Costs measured_costs(Costs costs, const std::vector<Measured>& measured) {
  costs.copies.clear();
  costs.held_for_weight.clear();
  costs.working = {{}, {}, {}, {}, {}, {}};
  const auto add = [](const Measured::Kind& kind, std::vector<double>& seconds, std::vector<double>& working) {
    seconds.push_back(mean(kind.seconds));
    working.push_back(static_cast<double>(kind.working));
  };
  for (const Measured& m : measured) {
    add(m.forward, costs.forward, costs.working.forward);
    add(m.input, costs.input, costs.working.input);
    add(m.weight, costs.weight, costs.working.weight);
    add(m.full, costs.full, costs.working.full);
    costs.copies.push_back(mean(m.copies));
    costs.working.first_weight.push_back(static_cast<double>(m.weight.first));
    costs.working.first_full.push_back(static_cast<double>(m.full.first));
    costs.activation.push_back(static_cast<double>(m.activation));
    const auto held = static_cast<double>(std::max<int64_t>(0, m.held));
    costs.held_for_weight.push_back(m.activation > 0 ? held / static_cast<double>(m.activation) : 1);
  }
  return costs;
}

// Returns what is known without a run: messages, the memory of state, and that of gradients. No seconds of actions.
StageCosts known_costs(const Pipe& pipe, const StageCostOptions& options) {
  StageCosts costs{.costs = {.forward = {}, .input = {}, .weight = {}, .communication = {}}};
  for (int s = 0; s < pipe.num_stages(); s++) {
    const int64_t bytes = message_bytes(pipe, s);
    costs.costs.values.push_back(static_cast<double>(bytes));
    const auto seconds = static_cast<double>(bytes) / options.bytes_per_second;
    costs.costs.communication.push_back(options.seconds_per_message + seconds);
    const int64_t buffer = wire::class_bytes(wire::size_class(bytes + static_cast<int64_t>(sizeof(wire::Prologue))));
    costs.costs.buffers.push_back(buffer > HostRings::kLongest ? static_cast<double>(buffer) : 0);
    double resident = 0, gradient = 0;
    for (const Attr& attr : pipe.stage(s)->state()) {
      const auto size = static_cast<double>(attr.tensor.nbytes());
      const bool trained = attr.kind == AttrKind::Parameter && attr.tensor.requires_grad();
      resident += size * (trained ? options.bytes_per_parameter_byte - 1 : 1);
      gradient += trained ? size : 0;
    }
    costs.resident.push_back(resident);
    costs.costs.gradient.push_back(gradient);
  }
  return costs;
}

// Returns how far the mean of the runs is above the least, of all together.
double spread_of(const std::vector<Measured>& measured) {
  double least_sum = 0, mean_sum = 0;
  for (const Measured& m : measured) {
    for (const auto* kind : {&m.forward, &m.input, &m.weight, &m.full}) {
      least_sum += *std::ranges::min_element(kind->seconds);
      mean_sum += mean(kind->seconds);
    }
  }
  return least_sum > 0 ? mean_sum / least_sum - 1 : 0;
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
  const int last = pipe.num_stages() - 1;
  std::optional<Measured> whole_last;
  if (stages[last]->recompute == Recompute::Cheap) whole_last.emplace();
  // As in a step, stages take turns, several microbatches are in flight, and gradients are added to earlier ones.
  constexpr int kInFlight = 4;
  for (int repeat = 0; repeat < std::max(1, options.repeats / kInFlight); repeat++) {
    for (const bool halves : {false, true}) {
      std::vector<Tensors> made;
      const auto run = [&](int s) {
        const auto* loss = options.loss && s == last ? &options.loss : nullptr;
        return std::make_unique<Run>(pipe, s, *stages[s], inputs, made, loss, meter);
      };
      if (repeat == 0) drop_gradients(pipe);
      std::vector<std::vector<std::unique_ptr<Run>>> microbatches(kInFlight);
      for (auto& runs : microbatches) {
        made.clear();
        for (int s = 0; s <= last; s++) {
          runs.push_back(run(s));
          made.push_back(runs.back()->outputs);
        }
      }
      for (int m = 0; whole_last && m < kInFlight; m++) {
        stages[last]->recompute = Recompute::None;
        const auto whole = run(last);
        whole->backward(halves, *whole_last);
        if (halves) whole->weight_half(*whole_last);
        stages[last]->recompute = Recompute::Cheap;
      }
      if (repeat == 0) drop_gradients(pipe);
      for (auto& runs : microbatches) {
        for (int s = last; s >= 0; s--) {
          runs[s]->backward(halves, measured[s]);
          if (!halves) runs[s].reset();
        }
      }
      // Later, as in most tables: its values are no longer in caches.
      for (auto& runs : microbatches) {
        for (int s = last; halves && s >= 0; s--) runs[s]->weight_half(measured[s]);
      }
    }
  }
  StageCosts result = known_costs(pipe, options);
  const Costs known = result.costs;
  result.costs = measured_costs(known, measured);
  result.spread = spread_of(measured);
  if (whole_last) {
    measured.back() = *whole_last;
    result.whole_last = measured_costs(known, measured);
  }
  return result;
}

StageCosts estimate_stages(const Pipe& pipe, const StageCostOptions& options) {
  StageCosts result = known_costs(pipe, options);
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
    result.costs.activation.push_back(bytes);
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
