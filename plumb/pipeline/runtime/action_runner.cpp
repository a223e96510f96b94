#include "plumb/pipeline/runtime/action_runner.h"

#include <ATen/ATen.h>

#include <exception>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

AgreedValue agreed_gradient(const std::optional<GradientMeta>& meta) {
  if (!meta) return {AgreedValue::Comes::Never, std::nullopt, std::nullopt};
  return {AgreedValue::Comes::Maybe, meta->options.dtype().toScalarType(), meta->sizes};
}

}  // namespace

// Returns the agreed gradients: those of the values that went the other way.
AgreedValues ActionRunner::agreed_grads(const LocalStage& stage, const StageWiring::GradBundle& bundle,
                                        const Slot& slot) const {
  std::vector<AgreedValue> agreed;
  for (const auto& [output, index] : runner_.targets_of(bundle, slot.outputs.size())) {
    const auto k = static_cast<size_t>(index);
    const ValueSource value = output ? ValueSource{stage.stage, k} : stage.wiring->sources[k];
    std::optional<GradientMeta> meta;
    if (output && k < slot.outputs.size()) meta = gradient_meta(slot.outputs[k]);
    if (!output && slot.boundary) meta = slot.boundary->gradient_meta(k);
    agreed.push_back(agreed_gradient(meta));
    agreed.back().codes = setup_.layout.gradient_format(value);
  }
  return agreed;
}

void ActionRunner::receive(const RunAction& run, LocalStage& stage, Slot& slot) {
  const auto& w = *stage.wiring;
  for (size_t i = 0; i < run.receives.size(); i++) {
    if (run.receives[i] < 0) continue;  // was handed over on this rank
    if (run.action.kind != ActionKind::Forward) {
      runner_.take_grads(stage, slot, w.grads_in[i].stage,
                         transport_
                             .receive(run.receives[i], run.text, agreed_grads(stage, w.grads_in[i], slot),
                                      wire_format(setup_.layout.wire.bwd))
                             .values);
      continue;
    }
    // The stage checks its values; it may take several kinds.
    AgreedValues agreed;
    if (!setup_.layout.dynamic_outputs) agreed.emplace();
    for (int k : w.values_in[i].indices) {
      if (agreed) agreed->emplace_back().codes = setup_.layout.value_format(w.sources[k]);
    }
    auto message = transport_.receive(run.receives[i], run.text, agreed, wire_format(setup_.layout.wire.fwd));
    slot.sizes.merge(unpack_sizes(message.sizes));
    runner_.take_values(stage, slot, w.values_in[i].stage, std::move(message.values));
  }
}

void ActionRunner::send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs) {
  const auto& bundles = stage.wiring->values_out;
  const auto& sizes = stage.slots[m].sizes;
  for (size_t i = 0; i < bundles.size(); i++) {
    if (run.sends[i] >= 0) {
      transport_.send(run.sends[i], runner_.values_for(stage.stage, bundles[i], outputs), pack_sizes(sizes));
      continue;
    }
    auto& to = runner_.stages.at(bundles[i].stage);
    auto& slot = to.slots[m];
    slot.sizes.insert(sizes.begin(), sizes.end());
    if (slot.values_given_for.count(stage.stage)) continue;
    runner_.prepare(to, slot);
    runner_.take_values(to, slot, stage.stage, arrived(runner_.values_for(stage.stage, bundles[i], outputs)));
  }
}

// Takes them out of the slot.
void ActionRunner::deliver_input_grads(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  runner_.check_input_grads(stage, slot, m);
  const Tensors grads = std::move(slot.input_grads);
  slot.input_grads.clear();
  const auto& bundles = stage.wiring->grads_out;
  for (size_t i = 0; i < bundles.size(); i++) {
    if (run.sends[i] >= 0) {
      transport_.send(run.sends[i], runner_.grads_for(stage, bundles[i], grads));
      continue;
    }
    auto& to = runner_.stages.at(bundles[i].stage);
    auto& other = to.slots[m];
    if (!other.grads_given_for.count(stage.stage))
      runner_.take_grads(to, other, stage.stage, arrived(runner_.grads_for(stage, bundles[i], grads)));
  }
  runner_.keep_input_grads(stage, m, grads);
}

void ActionRunner::forward(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  runner_.seed_generator(stage.stage, m);
  std::optional<CheapRecompute> recompute;
  runner_.run_function(stage, slot, m, run.backward_is_next ? nullptr : &recompute);
  runner_.check_results(stage, slot, m, /*hooked=*/false);
  runner_.finish_recompute(stage, slot, recompute);
  send_values(run, stage, m, slot.results);
  runner_.keep_for_backward(stage, slot);
}

void ActionRunner::backward(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  auto compute = [&] { runner_.run_backward(run.action.kind, stage, slot, m); };
  if (run.action.kind == ActionKind::BackwardInput) {
    compute();
  } else {
    stage.gradients->accumulate(m, compute);
  }
  if (run.action.kind == ActionKind::BackwardWeight) return;
  deliver_input_grads(run, stage, slot);
}

// The engine's part after a hook.
void ActionRunner::finish_hooked(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  auto require = [&](bool done, const char* what) {
    if (done) return;
    throw Error(ErrorKind::InvalidState, "the function in the place of " + run.text + " left out the " + what, "",
                "call the stage's method for it, or the driver's");
  };
  if (run.action.kind == ActionKind::Forward) {
    require(slot.went_forward, "forward of its stage");
    runner_.check_results(stage, slot, m, /*hooked=*/true);
    send_values(run, stage, m, slot.results);
    runner_.keep_for_backward(stage, slot);
  } else if (run.action.kind == ActionKind::BackwardWeight) {
    require(!slot.weights_due, "weight half of its stage's backward");
  } else {
    require(slot.went_back, "backward of its stage");
    require(run.action.kind == ActionKind::BackwardInput || !slot.weights_due, "weight half of its stage's backward");
    deliver_input_grads(run, stage, slot);
  }
}

// Calls the hook with the accumulation of all parts around it.
void ActionRunner::call_hook(std::span<const RunAction> parts, std::span<const RunAction> left) {
  if (left.empty()) {
    StepDriver driver(runner_);
    (*parts.front().hook)(parts.front().hooked, driver);
    return;
  }
  const Action& part = left.front().action;
  auto rest = [&] { call_hook(parts, left.subspan(1)); };
  if (part.kind == ActionKind::FullBackward || part.kind == ActionKind::BackwardWeight) {
    runner_.stages.at(part.stage).gradients->accumulate(part.microbatch, rest);
  } else {
    if (part.kind == ActionKind::Forward) runner_.seed_generator(part.stage, part.microbatch);
    rest();
  }
}

void ActionRunner::run_hook(std::span<const RunAction> parts) {
  call_hook(parts, parts);
  for (const auto& part : parts) {
    if (!part.action.is_compute()) continue;
    auto& stage = runner_.stages.at(part.action.stage);
    finish_hooked(part, stage, stage.slots[part.action.microbatch]);
  }
}

void ActionRunner::begin_step() {
  timeline.clear();
  reduced_.clear();
}

void ActionRunner::reduce_by_hook(int stage) {
  const ActionHook* hook = find_hook(setup_.options.hooks, ActionKind::ReduceGrad, stage);
  if (hook == nullptr || !reduced_.insert(stage).second) return;
  RunAction run{Action::of_stage(ActionKind::ReduceGrad, stage)};
  run.text = to_string(run.action);
  run.hook = hook;
  run.hooked = run.action;
  runner_.stages.at(stage).gradients->reduce([&] { this->run({&run, 1}); });
}

void ActionRunner::run(std::span<const RunAction> parts) {
  const RunAction& run = parts.front();
  TimelineEvent event{setup_.rank, run.hooked};
  if (setup_.options.record_timeline) event.waiting = seconds_now();
  const std::int64_t sent_before = transport_.sent();
  const auto me = [&] { return str("rank ", transport_.group().world_rank(setup_.rank)); };
  const RunAction* at = &run;  // for the error's text
  try {
    for (const auto& part : parts) {
      at = &part;
      if (!part.action.is_compute()) continue;
      auto& stage = runner_.stages.at(part.action.stage);
      runner_.prepare(stage, stage.slots[part.action.microbatch]);
      receive(part, stage, stage.slots[part.action.microbatch]);
    }
    at = &run;
    if (setup_.options.record_timeline) event.start = seconds_now();
    if (run.hook != nullptr) {
      run_hook(parts);
    } else {
      auto& stage = runner_.stages.at(run.action.stage);
      auto& slot = stage.slots[run.action.microbatch];
      run.action.kind == ActionKind::Forward ? forward(run, stage, slot) : backward(run, stage, slot);
    }
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::Communication) throw;
    const std::string text = parts.size() > 1 && at == &run ? to_string(run.hooked) : at->text;
    std::throw_with_nested(Error(e.kind(), str(me(), " at ", text, ": ", e.message()), e.where(), e.remedy()));
  } catch (const std::exception& e) {
    std::throw_with_nested(Error(ErrorKind::ExecutionFailed, str(me(), " at ", at->text, ": ", error_text(e))));
  }
  if (setup_.options.record_timeline) {
    event.end = seconds_now();
    event.sent = transport_.sent() - sent_before;
    timeline.push_back(event);
  }
}

}  // namespace plumb
