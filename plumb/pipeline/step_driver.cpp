#include "plumb/pipeline/step_driver.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/runtime_state.h"

namespace plumb {
namespace {

// A microbatch's number is a place in a list.
constexpr int kMostByHand = 1 << 16;

struct Found {
  LocalStage& local;
  Slot& slot;
};

Found find(PipelineState& state, int stage, int microbatch) {
  const auto it = state.stages.find(stage);
  if (it == state.stages.end()) {
    throw Error(ErrorKind::InvalidArgument, str("stage ", stage, " is not on this rank"));
  }
  auto& slots = it->second.slots;
  if (!state.by_hand && state.inputs == nullptr) {
    throw Error(ErrorKind::InvalidState, str("stage ", stage, " is run outside of a step"));
  }
  const auto have = static_cast<int>(slots.size());
  if (microbatch < 0 || microbatch >= (state.by_hand ? kMostByHand : have)) {
    throw Error(ErrorKind::InvalidArgument, str("there is no microbatch ", microbatch, " in stage ", stage));
  }
  if (microbatch >= have) slots.resize(microbatch + 1);
  return {it->second, slots[microbatch]};
}

std::string place(const LocalStage& stage, int microbatch) {
  return str("microbatch ", microbatch, " in stage ", stage.stage);
}

void check_count(size_t given, size_t expected, const LocalStage& stage, int microbatch, const char* what) {
  if (given == expected) return;
  throw Error(ErrorKind::StructureMismatch,
              str(given, " ", what, " were given to ", place(stage, microbatch), ", there are ", expected));
}

}  // namespace

StepDriver::StepDriver(PipelineState& step) : state_(&step) {}

StepDriver::StepDriver(PipelineLayout layout, int stage, std::shared_ptr<StageFunction> function)
    : own_(std::make_unique<PipelineState>(ProcessGroup())), state_(own_.get()) {
  auto& state = *own_;
  state.wiring = connect_stages(layout);
  if (stage < 0 || stage >= layout.num_stages()) {
    throw Error(ErrorKind::InvalidArgument,
                str("there is no stage ", stage, " among ", layout.num_stages(), " stages"));
  }
  state.by_hand = true;
  state.options.return_outputs = false;
  LocalStage local;
  local.stage = stage;
  local.function = std::move(function);
  local.wiring = &state.wiring[stage];
  local.num_outputs = layout.stages[stage].num_outputs;
  state.layout = std::move(layout);
  state.stages.emplace(stage, std::move(local));
}

StepDriver::StepDriver(StepDriver&&) noexcept = default;
StepDriver::~StepDriver() = default;

void StepDriver::forward(int stage, int microbatch) {
  auto& state = *state_;
  const auto [local, slot] = find(state, stage, microbatch);
  if (state.by_hand) {
    state.training = at::GradMode::is_enabled();
    if (slot.went_forward && local.wiring->values_in.empty()) slot = Slot();
    for (const auto& bundle : local.wiring->values_in) {
      if (slot.values_given_for.count(bundle.stage) || slot.went_forward) continue;
      throw Error(ErrorKind::InvalidState,
                  str(place(local, microbatch), " runs before the values of stage ", bundle.stage, " arrived"));
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
  const auto [local, slot] = find(*state_, stage, microbatch);
  const bool of_outputs = kind != ActionKind::BackwardWeight && stage != state_->last_stage();
  for (const auto& bundle : local.wiring->grads_in) {
    if (!state_->by_hand || !of_outputs || slot.grads_given_for.count(bundle.stage)) continue;
    throw Error(ErrorKind::InvalidState,
                str(place(local, microbatch), " goes back before the gradients of stage ", bundle.stage, " arrived"));
  }
  state_->run_backward(kind, local, slot, microbatch, loss);
}

void StepDriver::set_loss(int microbatch, const at::Tensor& loss) {
  find(*state_, state_->last_stage(), microbatch).slot.loss = loss;
}

void StepDriver::take_outputs(int stage, int microbatch, int from, const Tensors& outputs, const ModelSizes& sizes) {
  auto& state = *state_;
  const auto [local, slot] = find(state, stage, microbatch);
  if (from < 0 || from >= stage) {
    throw Error(ErrorKind::InvalidArgument, str(place(local, microbatch), " takes nothing from stage ", from));
  }
  if (state.by_hand && slot.went_forward) slot = Slot();
  if (!state.layout.dynamic_outputs)
    check_count(outputs.size(), static_cast<size_t>(state.layout.stages[from].num_outputs), local, microbatch,
                "values");
  state.training = state.by_hand ? at::GradMode::is_enabled() : state.training;
  state.prepare(local, slot);
  for (const auto& bundle : state.wiring[from].values_out) {
    if (bundle.stage == stage) state.take_values(local, slot, from, arrived(state.values_for(from, bundle, outputs)));
  }
  slot.values_given_for.insert(from);
  slot.sizes.insert(sizes.begin(), sizes.end());
}

void StepDriver::take_gradients(int stage, int microbatch, int from, const Tensors& gradients) {
  const auto [local, slot] = find(*state_, stage, microbatch);
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
  const auto [local, slot] = find(*state_, stage, microbatch);
  if (state_->by_hand && slot.went_forward && local.wiring->values_in.empty()) slot = Slot();
  const Tensors* others = state_->model_inputs(slot, microbatch);
  Tensors all = inputs;
  for (size_t i = 0; others != nullptr && i < others->size() && i < all.size(); i++) {
    if (!all[i].defined()) all[i] = (*others)[i];
  }
  slot.model_inputs = std::move(all);
}

Tensors StepDriver::input_gradients(int stage, int microbatch, int to) const {
  const auto [local, slot] = find(*state_, stage, microbatch);
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
