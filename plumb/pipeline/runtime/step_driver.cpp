#include "plumb/pipeline/runtime/step_driver.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/runtime/stage_runner.h"

namespace plumb {
namespace {

// A microbatch's number is a place in a list.
constexpr int kMostByHand = 1 << 16;

struct Found {
  LocalStage& local;
  Slot& slot;
};

// `by_hand`: there is no step, and there are as many microbatches as are asked for.
Found find(StageRunner& runner, bool by_hand, int stage, int microbatch) {
  const auto it = runner.stages.find(stage);
  if (it == runner.stages.end()) {
    throw Error(ErrorKind::InvalidArgument, str("stage ", stage, " is not on this rank"));
  }
  auto& slots = it->second.slots;
  if (!by_hand && runner.batch.inputs == nullptr) {
    throw Error(ErrorKind::InvalidState, str("stage ", stage, " is run outside of a step"));
  }
  const auto have = static_cast<int>(slots.size());
  if (microbatch < 0 || microbatch >= (by_hand ? kMostByHand : have)) {
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

PipelineSetup setup_by_hand(PipeTable layout, int stage) {
  PipelineSetup setup;
  setup.wiring = connect_stages(layout);
  if (stage < 0 || stage >= layout.num_stages()) {
    throw Error(ErrorKind::InvalidArgument,
                str("there is no stage ", stage, " among ", layout.num_stages(), " stages"));
  }
  setup.options.return_outputs = false;
  setup.layout = std::move(layout);
  return setup;
}

}  // namespace

StepDriver::StepDriver(StageRunner& runner) : runner_(&runner) {}

StepDriver::StepDriver(PipeTable layout, int stage, std::shared_ptr<StageFunction> function) {
  if (!function) throw Error(ErrorKind::InvalidArgument, str("the function of stage ", stage, " is a null pointer"));
  own_ = std::make_unique<StageRunner>(setup_by_hand(std::move(layout), stage),
                                       std::map<int, std::shared_ptr<StageFunction>>{{stage, std::move(function)}});
  runner_ = own_.get();
}

StepDriver::StepDriver(StepDriver&&) noexcept = default;
StepDriver::~StepDriver() = default;

void StepDriver::forward(int stage, int microbatch) {
  auto& runner = *runner_;
  const auto [local, slot] = find(runner, own_ != nullptr, stage, microbatch);
  if (own_) {
    runner.training = at::GradMode::is_enabled();
    if (slot.went_forward && local.wiring->values_in.empty()) slot = Slot();
    for (const auto& bundle : local.wiring->values_in) {
      if (slot.values_given_for.count(bundle.stage) || slot.went_forward) continue;
      throw Error(ErrorKind::InvalidState,
                  str(place(local, microbatch), " runs before the values of stage ", bundle.stage, " arrived"));
    }
    runner.prepare(local, slot);
  }
  if (slot.went_forward) throw Error(ErrorKind::InvalidState, place(local, microbatch) + " goes forward twice");
  std::optional<CheapRecompute> recompute;
  runner.run_function(local, slot, microbatch, &recompute);
  runner.finish_recompute(local, slot, recompute);
  if (own_) runner.keep_for_backward(local, slot);
}

void StepDriver::backward(ActionKind kind, int stage, int microbatch, const at::Tensor& loss) {
  const auto [local, slot] = find(*runner_, own_ != nullptr, stage, microbatch);
  const bool of_outputs = kind != ActionKind::BackwardWeight && stage != runner_->setup.last_stage();
  for (const auto& bundle : local.wiring->grads_in) {
    if (!own_ || !of_outputs || slot.grads_given_for.count(bundle.stage)) continue;
    throw Error(ErrorKind::InvalidState,
                str(place(local, microbatch), " goes back before the gradients of stage ", bundle.stage, " arrived"));
  }
  runner_->run_backward(kind, local, slot, microbatch, loss);
}

void StepDriver::set_loss(int microbatch, const at::Tensor& loss) {
  find(*runner_, own_ != nullptr, runner_->setup.last_stage(), microbatch).slot.loss = loss;
}

void StepDriver::take_outputs(int stage, int microbatch, int from, const Tensors& outputs, const ModelSizes& sizes) {
  auto& runner = *runner_;
  const auto [local, slot] = find(runner, own_ != nullptr, stage, microbatch);
  if (from < 0 || from >= stage) {
    throw Error(ErrorKind::InvalidArgument, str(place(local, microbatch), " takes nothing from stage ", from));
  }
  if (own_ && slot.went_forward) slot = Slot();
  if (!runner.setup.layout.dynamic_outputs)
    check_count(outputs.size(), runner.setup.layout.stages[from].outputs.size(), local, microbatch, "values");
  runner.training = own_ ? at::GradMode::is_enabled() : runner.training;
  runner.prepare(local, slot);
  for (const auto& bundle : runner.setup.wiring[from].values_out) {
    if (bundle.stage == stage) runner.take_values(local, slot, from, arrived(runner.values_for(from, bundle, outputs)));
  }
  slot.values_given_for.insert(from);
  slot.sizes.insert(sizes.begin(), sizes.end());
}

void StepDriver::take_gradients(int stage, int microbatch, int from, const Tensors& gradients) {
  const auto [local, slot] = find(*runner_, own_ != nullptr, stage, microbatch);
  std::vector<MessageValue> values;
  for (const auto& g : gradients) values.push_back({g, false});
  for (const auto& bundle : local.wiring->grads_in) {
    if (bundle.stage != from) continue;
    const size_t expected = runner_->setup.layout.dynamic_outputs ? slot.outputs.size() : bundle.targets.size();
    check_count(values.size(), expected, local, microbatch, "gradients");
    runner_->take_grads(local, slot, from, values);
  }
  slot.grads_given_for.insert(from);
}

void StepDriver::take_model_inputs(int stage, int microbatch, const Tensors& inputs) {
  const auto [local, slot] = find(*runner_, own_ != nullptr, stage, microbatch);
  if (own_ && slot.went_forward && local.wiring->values_in.empty()) slot = Slot();
  const Tensors* others = runner_->model_inputs(slot, microbatch);
  Tensors all = inputs;
  for (size_t i = 0; others != nullptr && i < others->size() && i < all.size(); i++) {
    if (!all[i].defined()) all[i] = (*others)[i];
  }
  slot.model_inputs = std::move(all);
}

Tensors StepDriver::input_gradients(int stage, int microbatch, int to) const {
  const auto [local, slot] = find(*runner_, own_ != nullptr, stage, microbatch);
  if (!slot.went_back) {
    throw Error(ErrorKind::InvalidState, place(local, microbatch) + " has no gradients of inputs: it did not go back");
  }
  Tensors gradients;
  for (const auto& bundle : local.wiring->grads_out) {
    if (bundle.stage != to) continue;
    for (const auto& value : arrived(runner_->grads_for(local, bundle, slot.input_grads)))
      gradients.push_back(value.tensor);
  }
  return gradients;
}

const ActionHook* find_hook(const ActionHooks& hooks, ActionKind kind, int stage) {
  if (hooks.empty()) return nullptr;
  auto it = hooks.find({kind, stage});
  if (it == hooks.end()) it = hooks.find({kind, HookPoint::kEveryStage});
  return it == hooks.end() ? nullptr : &it->second;
}

}  // namespace plumb
