#include "plumb/pipeline/runtime/stage_runner.h"

#include <ATen/ATen.h>

#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/backward_errors.h"
#include "plumb/numerics/operators.h"

namespace plumb {
namespace {

const FPFormat* codes_of(const at::Tensor& t, const FPFormat* format) {
  return t.defined() && has_wire_codes(t.scalar_type()) ? format : nullptr;
}

}  // namespace

StageRunner::StageRunner(PipelineSetup given, const std::map<int, std::shared_ptr<StageFunction>>& functions)
    : setup(std::move(given)) {
  for (const auto& [index, function] : functions) {
    const auto num_outputs = static_cast<int>(setup.layout.stages[index].outputs.size());
    stages.emplace(index, LocalStage{index, function, &setup.wiring[index], num_outputs});
  }
}

at::Tensor moved_to(const LocalStage& stage, const at::Tensor& x) {
  if (!x.defined()) return x;
  const auto device = stage.function->device();
  return device && !device->is_meta() && x.device() != *device ? x.detach().to(*device) : x;
}

std::vector<MessageValue> arrived(std::vector<MessageValue> values) {
  at::NoGradGuard no_grad;
  for (auto& v : values) {
    if (v.codes != nullptr) {  // through its codes, which have no -0 in some formats
      const std::string format = v.codes->to_string();
      v.tensor = ops::decode(ops::encode(v.tensor, format), format, v.tensor.scalar_type());
    }
    v.codes = nullptr;
  }
  return values;
}

void StageRunner::take_values(LocalStage& stage, Slot& slot, int from, std::vector<MessageValue> values) const {
  if (setup.layout.dynamic_outputs) slot.sources.resize(values.size());
  for (const auto& bundle : stage.wiring->values_in) {
    if (bundle.stage != from) continue;
    const auto to = places(bundle, values.size());
    for (size_t i = 0; i < to.size(); i++) slot.sources[to[i]] = std::move(values.at(i));
  }
}

void StageRunner::take_grads(LocalStage& stage, Slot& slot, int from, const std::vector<MessageValue>& values) const {
  if (setup.layout.dynamic_outputs) slot.output_grads.resize(values.size());
  for (const auto& bundle : stage.wiring->grads_in) {
    if (bundle.stage != from) continue;
    const auto to = targets_of(bundle, values.size());
    for (size_t i = 0; i < to.size(); i++)
      (to[i].output ? slot.output_grads : slot.seeds)[to[i].index] = moved_to(stage, values.at(i).tensor);
  }
}

// The places of a bundle's values among `count`: with dynamic outputs all of them cross.
std::vector<int> StageRunner::places(const StageWiring::Bundle& bundle, size_t count) const {
  if (!setup.layout.dynamic_outputs) return bundle.indices;
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<StageWiring::GradBundle::Target> StageRunner::targets_of(const StageWiring::GradBundle& bundle,
                                                                     size_t count) const {
  if (!setup.layout.dynamic_outputs) return bundle.targets;
  std::vector<StageWiring::GradBundle::Target> all;
  for (size_t k = 0; k < count; k++) all.push_back({true, static_cast<int>(k)});
  return all;
}

std::vector<MessageValue> StageRunner::values_for(int from, const StageWiring::Bundle& bundle,
                                                  const Tensors& outputs) const {
  std::vector<MessageValue> values;
  for (int k : places(bundle, outputs.size())) {
    const at::Tensor& t = outputs[k];
    values.push_back({t.defined() ? t.detach() : t, t.defined() && t.requires_grad(),
                      codes_of(t, setup.layout.value_format({from, static_cast<size_t>(k)}))});
  }
  return values;
}

std::vector<MessageValue> StageRunner::grads_for(const LocalStage& of, const StageWiring::Bundle& bundle,
                                                 const Tensors& grads) const {
  std::vector<MessageValue> values;
  for (int k : places(bundle, grads.size())) {
    const auto& source = of.wiring->sources[setup.layout.dynamic_outputs ? 0 : k];
    values.push_back({grads[k], false, codes_of(grads[k], setup.layout.gradient_format(source))});
  }
  return values;
}

void StageRunner::prepare(LocalStage& stage, Slot& slot) const {
  if (setup.layout.dynamic_outputs) return;  // sized by what arrives
  if (slot.sources.empty()) slot.sources.resize(stage.wiring->sources.size());
  if (training && slot.seeds.empty()) {
    slot.seeds.resize(stage.wiring->sources.size());
    slot.output_grads.resize(stage.num_outputs);
  }
}

namespace {

Tensors values_of(const std::vector<NamedTensor>& buffers) {
  Tensors values;
  for (const auto& b : buffers) values.push_back(b.tensor.detach().clone());
  return values;
}

// Norms save their statistics for the backward and do not read them there: no version may change, as none does where
// their kernels write them.
void put(const std::vector<NamedTensor>& buffers, const Tensors& values) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers.size(); i++) buffers[i].tensor.variable_data().copy_(values[i]);
}

}  // namespace

GroupBuffers::GroupBuffers(std::vector<NamedTensor> buffers, int groups, int microbatches)
    : buffers_(std::move(buffers)), groups_(groups), size_(microbatches / groups) {}

void GroupBuffers::begin_step() {
  before_ = values_of(buffers_);
  by_group_.assign(groups_, {});
  now_ = -1;
}

void GroupBuffers::keep() {
  if (now_ >= 0) by_group_[now_] = values_of(buffers_);
}

void GroupBuffers::begin_microbatch(int microbatch) {
  const int group = microbatch / size_;
  if (group == now_ || buffers_.empty()) return;
  keep();
  const Tensors& held = by_group_[group];
  put(buffers_, held.empty() ? before_ : held);
  now_ = group;
}

Tensors GroupBuffers::sums() {
  keep();
  Tensors sums;
  for (size_t i = 0; i < buffers_.size(); i++) {
    Tensors parts;
    for (const Tensors& values : by_group_) parts.push_back(values.empty() ? before_[i] : values[i]);
    sums.push_back(buffers_[i].tensor.is_floating_point() ? tree_sum(std::move(parts)) : parts[0]);
  }
  return sums;
}

void GroupBuffers::finish_step(const Tensors& sums, int groups_of_all) {
  Tensors means;
  for (const at::Tensor& sum : sums) means.push_back(sum.is_floating_point() ? sum / groups_of_all : sum);
  put(buffers_, means);
}

// Outputs with a gradient, and their gradients.
void StageRunner::start_of_backward(const LocalStage& stage, const Slot& slot, int m, const at::Tensor& loss,
                                    Tensors& outputs, Tensors& grads) const {
  if (stage.stage == setup.last_stage()) {
    const at::Tensor& root = loss.defined() ? loss : slot.loss;
    if (!root.defined()) {
      throw Error(ErrorKind::InvalidState, str("microbatch ", m, " goes back from the last stage without a loss"), "",
                  "give its backward the loss");
    }
    outputs.push_back(root);
    const bool weighted = loss.defined() || batch.weights[m] == 1;
    grads.push_back(weighted ? at::ones_like(root) : at::full_like(root, batch.weights[m]));
    return;
  }
  if (slot.output_grads.size() != slot.outputs.size()) {
    throw Error(ErrorKind::Communication, str("stage ", stage.stage, " sent ", slot.outputs.size(),
                                              " values and got gradients for ", slot.output_grads.size()));
  }
  for (size_t k = 0; k < slot.outputs.size(); k++) {
    if (!slot.outputs[k].defined() || !slot.output_grads[k].defined()) continue;
    outputs.push_back(slot.outputs[k]);
    grads.push_back(slot.output_grads[k]);
  }
}

void StageRunner::run_backward(ActionKind kind, LocalStage& stage, Slot& slot, int m, const at::Tensor& loss) try {
  if (stage.buffers) stage.buffers->begin_microbatch(m);
  if (kind == ActionKind::BackwardWeight) {
    if (!slot.weights_due) {
      throw Error(ErrorKind::InvalidState, str("the weight half of microbatch ", m, " in stage ", stage.stage,
                                               " comes without the input half before it"));
    }
    if (slot.deferred.pending()) stage_backward_weight(slot.deferred);
    if (slot.own_weight_work) slot.own_weight_work();
    slot = Slot();
    return;
  }
  if (!slot.boundary) {
    throw Error(ErrorKind::InvalidState,
                str("microbatch ", m, " goes back in stage ", stage.stage, " without a forward before it"));
  }
  Tensors outputs, grads;
  start_of_backward(stage, slot, m, loss, outputs, grads);
  const bool own_work = stage.function->has_own_weight_work();
  Slot done;
  done.went_back = true;
  if (own_work || kind == ActionKind::FullBackward) {
    done.input_grads = stage_backward(outputs, grads, *slot.boundary, slot.seeds);
    slot = Slot();
    if (own_work) done.own_weight_work = stage.function->own_weight_work();
  } else {
    auto half = stage_backward_input(outputs, grads, *slot.boundary, slot.seeds);
    done.input_grads = std::move(half.input_grads);
    done.deferred = std::move(half.deferred);
  }
  done.weights_due = kind == ActionKind::BackwardInput;
  if (!done.weights_due && done.own_weight_work) std::exchange(done.own_weight_work, nullptr)();
  slot = std::move(done);
} catch (const std::exception& error) {
  // Asked only now: a stage of Python's takes the interpreter's lock for it.
  if (const Graph* graph = stage.function->graph()) rethrow_named(*graph, error);
  throw;
}

void StageRunner::check_input_grads(const LocalStage& stage, const Slot& slot, int m) const {
  if (!setup.options.check_numerics) return;
  for (size_t i = 0; i < slot.input_grads.size(); i++) {
    check_finite(slot.input_grads[i], [&] { return value_name("the gradient of input ", i, stage.stage, m); });
  }
}

// Later stages come first, as autograd adds.
void StageRunner::keep_input_grads(const LocalStage& stage, int m, const Tensors& grads) {
  const auto& sources = stage.wiring->sources;
  for (size_t i = 0; !setup.layout.dynamic_outputs && i < sources.size(); i++) {
    if (sources[i].stage >= 0 || !grads[i].defined()) continue;
    batch.input_grads.resize(setup.schedule.num_microbatches);
    auto& kept = batch.input_grads[m];
    kept.resize(setup.layout.num_inputs);
    auto& sum = kept[sources[i].index];
    // On the input's device: stages that use it may be on several devices.
    const bool known = batch.inputs != nullptr && !batch.inputs->empty();
    const at::Tensor grad = known ? grads[i].to((*batch.inputs)[m][sources[i].index].device()) : grads[i];
    sum = sum.defined() ? sum + grad : grad;
  }
}

}  // namespace plumb
