#include "plumb/pipeline/step_driver.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "plumb/core/error.h"
#include "plumb/pipeline/runtime_state.h"

namespace plumb {
namespace {

// A microbatch's number is a place in a list.
constexpr int kMostByHand = 1 << 16;

LocalStage& find_stage(PipelineState& state, int stage) {
  const auto it = state.stages.find(stage);
  if (it == state.stages.end()) {
    throw Error(ErrorKind::InvalidArgument, "stage " + std::to_string(stage) + " is not on this rank");
  }
  return it->second;
}

Slot& find_slot(PipelineState& state, LocalStage& stage, int microbatch) {
  if (!state.by_hand && state.inputs == nullptr) {
    throw Error(ErrorKind::InvalidState, "stage " + std::to_string(stage.stage) + " is run outside of a step");
  }
  const auto have = static_cast<int>(stage.slots.size());
  if (microbatch < 0 || microbatch >= (state.by_hand ? kMostByHand : have)) {
    throw Error(ErrorKind::InvalidArgument,
                "there is no microbatch " + std::to_string(microbatch) + " in stage " + std::to_string(stage.stage));
  }
  if (microbatch >= have) stage.slots.resize(static_cast<size_t>(microbatch) + 1);
  return stage.slots[static_cast<size_t>(microbatch)];
}

std::string place(const LocalStage& stage, int microbatch) {
  return "microbatch " + std::to_string(microbatch) + " in stage " + std::to_string(stage.stage);
}

void check_count(size_t given, size_t expected, const LocalStage& stage, int microbatch, const char* what) {
  if (given == expected) return;
  throw Error(ErrorKind::StructureMismatch, std::to_string(given) + " " + what + " were given to " +
                                                place(stage, microbatch) + ", there are " + std::to_string(expected));
}

}  // namespace

StepDriver::StepDriver(PipelineState& step) : state_(&step) {}

StepDriver::StepDriver(PipelineLayout layout, int stage, std::shared_ptr<StageFunction> function)
    : own_(std::make_unique<PipelineState>(ProcessGroup())), state_(own_.get()) {
  auto& state = *own_;
  state.wiring = connect_stages(layout);
  if (stage < 0 || stage >= layout.num_stages()) {
    throw Error(ErrorKind::InvalidArgument, "there is no stage " + std::to_string(stage) + " among " +
                                                std::to_string(layout.num_stages()) + " stages");
  }
  state.by_hand = true;
  state.options.return_outputs = false;
  LocalStage local;
  local.stage = stage;
  local.function = std::move(function);
  local.wiring = &state.wiring[static_cast<size_t>(stage)];
  local.num_outputs = layout.stages[static_cast<size_t>(stage)].num_outputs;
  state.layout = std::move(layout);
  state.stages.emplace(stage, std::move(local));
}

StepDriver::StepDriver(StepDriver&&) noexcept = default;
StepDriver::~StepDriver() = default;

void StepDriver::forward(int stage, int microbatch) {
  auto& state = *state_;
  auto& local = find_stage(state, stage);
  auto& slot = find_slot(state, local, microbatch);
  if (state.by_hand) {
    state.training = at::GradMode::is_enabled();
    if (slot.went_forward && local.wiring->values_in.empty()) slot = Slot();
    for (const auto& bundle : local.wiring->values_in) {
      if (slot.values_given_for.count(bundle.stage) || slot.went_forward) continue;
      throw Error(ErrorKind::InvalidState, place(local, microbatch) + " runs before the values of stage " +
                                               std::to_string(bundle.stage) + " arrived");
    }
    state.prepare(local, slot);
  }
  if (slot.went_forward) throw Error(ErrorKind::InvalidState, place(local, microbatch) + " goes forward twice");
  std::optional<CheapRecompute> recompute;
  state.run_function(local, slot, microbatch, &recompute);
  state.finish_recompute(local, slot, recompute);
  if (state.by_hand) state.keep_for_backward(local, slot);
}

void StepDriver::backward(ActionKind kind, int stage, int microbatch, const at::Tensor& loss) {
  auto& local = find_stage(*state_, stage);
  auto& slot = find_slot(*state_, local, microbatch);
  const bool of_outputs = kind != ActionKind::BackwardWeight && stage != state_->last_stage();
  for (const auto& bundle : local.wiring->grads_in) {
    if (!state_->by_hand || !of_outputs || slot.grads_given_for.count(bundle.stage)) continue;
    throw Error(ErrorKind::InvalidState, place(local, microbatch) + " goes back before the gradients of stage " +
                                             std::to_string(bundle.stage) + " arrived");
  }
  state_->run_backward(kind, local, slot, microbatch, loss);
}

void StepDriver::set_loss(int microbatch, const at::Tensor& loss) {
  auto& local = find_stage(*state_, state_->last_stage());
  find_slot(*state_, local, microbatch).loss = loss;
}

void StepDriver::take_outputs(int stage, int microbatch, int from, const Tensors& outputs, const ModelSizes& sizes) {
  auto& state = *state_;
  auto& local = find_stage(state, stage);
  auto& slot = find_slot(state, local, microbatch);
  if (from < 0 || from >= stage) {
    throw Error(ErrorKind::InvalidArgument,
                place(local, microbatch) + " takes nothing from stage " + std::to_string(from));
  }
  if (state.by_hand && slot.went_forward) slot = Slot();
  if (!state.layout.dynamic_outputs)
    check_count(outputs.size(), static_cast<size_t>(state.layout.stages[from].num_outputs), local, microbatch,
                "values");
  state.training = state.by_hand ? at::GradMode::is_enabled() : state.training;
  state.prepare(local, slot);
  for (const auto& bundle : state.wiring[static_cast<size_t>(from)].values_out) {
    if (bundle.stage == stage) state.take_values(local, slot, from, arrived(state.values_for(from, bundle, outputs)));
  }
  slot.values_given_for.insert(from);
  slot.sizes.insert(sizes.begin(), sizes.end());
}

void StepDriver::take_gradients(int stage, int microbatch, int from, const Tensors& gradients) {
  auto& local = find_stage(*state_, stage);
  auto& slot = find_slot(*state_, local, microbatch);
  std::vector<MessageValue> values;
  for (const auto& g : gradients) values.push_back({g, false});
  for (const auto& bundle : local.wiring->grads_in) {
    if (bundle.stage != from) continue;
    const size_t expected = state_->layout.dynamic_outputs ? slot.outputs.size() : bundle.targets.size();
    check_count(values.size(), expected, local, microbatch, "gradients");
    state_->take_grads(local, slot, from, values);
  }
  slot.grads_given_for.insert(from);
}

void StepDriver::take_model_inputs(int stage, int microbatch, const Tensors& inputs) {
  auto& local = find_stage(*state_, stage);
  auto& slot = find_slot(*state_, local, microbatch);
  if (state_->by_hand && slot.went_forward && local.wiring->values_in.empty()) slot = Slot();
  const Tensors* others = state_->model_inputs(slot, microbatch);
  Tensors all = inputs;
  for (size_t i = 0; others != nullptr && i < others->size() && i < all.size(); i++) {
    if (!all[i].defined()) all[i] = (*others)[i];
  }
  slot.model_inputs = std::move(all);
}

Tensors StepDriver::input_gradients(int stage, int microbatch, int to) const {
  auto& local = find_stage(*state_, stage);
  const auto& slot = find_slot(*state_, local, microbatch);
  if (!slot.went_back) {
    throw Error(ErrorKind::InvalidState, place(local, microbatch) + " has no gradients of inputs: it did not go back");
  }
  Tensors gradients;
  for (const auto& bundle : local.wiring->grads_out) {
    if (bundle.stage != to) continue;
    for (const auto& value : arrived(state_->grads_for(local, bundle, slot.input_grads)))
      gradients.push_back(value.tensor);
  }
  return gradients;
}

const ActionHooks& no_hooks() {
  static const ActionHooks none;
  return none;
}

const ActionHook* find_hook(const ActionHooks& hooks, ActionKind kind, int stage) {
  if (hooks.empty()) return nullptr;
  auto it = hooks.find({kind, stage});
  if (it == hooks.end()) it = hooks.find({kind, HookPoint::kEveryStage});
  return it == hooks.end() ? nullptr : &it->second;
}

}  // namespace plumb
