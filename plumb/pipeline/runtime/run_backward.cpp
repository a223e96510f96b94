// A stage's backward of one microbatch: whole, or one of its halves.
#include <ATen/ATen.h>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/runtime/stage_runner.h"

namespace plumb {

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

void StageRunner::run_backward(ActionKind kind, LocalStage& stage, Slot& slot, int m, const at::Tensor& loss) {
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
