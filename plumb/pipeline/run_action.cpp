// One action, or several that a hook runs as one: what it waits for, and what it hands over.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/numerics/operators.h"
#include "plumb/pipeline/runtime_state.h"

namespace plumb {
namespace {

AgreedValue agreed_gradient(const std::optional<GradientMeta>& meta) {
  if (!meta) return {AgreedValue::Comes::Never, std::nullopt, std::nullopt};
  return {AgreedValue::Comes::Maybe, meta->options.dtype().toScalarType(), meta->sizes};
}

const FPFormat* codes_of(const at::Tensor& t, const FPFormat* format) {
  return t.defined() && has_wire_codes(t.scalar_type()) ? format : nullptr;
}

}  // namespace

std::vector<MessageValue> arrived(std::vector<MessageValue> values) {
  at::NoGradGuard no_grad;
  for (auto& v : values) {
    if (v.codes != nullptr) v.tensor = ops::quantise(v.tensor, v.codes->to_string());
    v.codes = nullptr;
  }
  return values;
}

void PipelineState::take_values(LocalStage& stage, Slot& slot, int from, std::vector<MessageValue> values) const {
  if (layout.dynamic_outputs) slot.sources.resize(values.size());
  for (const auto& bundle : stage.wiring->values_in) {
    if (bundle.stage != from) continue;
    const auto to = places(bundle, values.size());
    for (size_t i = 0; i < to.size(); i++) slot.sources[to[i]] = std::move(values.at(i));
  }
}

void PipelineState::take_grads(LocalStage& stage, Slot& slot, int from, const std::vector<MessageValue>& values) const {
  if (layout.dynamic_outputs) slot.output_grads.resize(values.size());
  for (const auto& bundle : stage.wiring->grads_in) {
    if (bundle.stage != from) continue;
    const auto to = targets_of(bundle, values.size());
    for (size_t i = 0; i < to.size(); i++)
      (to[i].output ? slot.output_grads : slot.seeds)[to[i].index] = moved_to(stage, values.at(i).tensor);
  }
}

// Returns the places of a bundle's values among `count`: with dynamic outputs all of them cross.
std::vector<int> PipelineState::places(const StageWiring::Bundle& bundle, size_t count) const {
  if (!layout.dynamic_outputs) return bundle.indices;
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<StageWiring::GradBundle::Target> PipelineState::targets_of(const StageWiring::GradBundle& bundle,
                                                                       size_t count) const {
  if (!layout.dynamic_outputs) return bundle.targets;
  std::vector<StageWiring::GradBundle::Target> all;
  for (size_t k = 0; k < count; k++) all.push_back({true, static_cast<int>(k)});
  return all;
}

std::vector<MessageValue> PipelineState::values_for(int from, const StageWiring::Bundle& bundle,
                                                    const Tensors& outputs) const {
  std::vector<MessageValue> values;
  for (int k : places(bundle, outputs.size())) {
    const at::Tensor& t = outputs[k];
    values.push_back(
        {t.defined() ? t.detach() : t, t.defined() && t.requires_grad(), codes_of(t, layout.value_format({from, k}))});
  }
  return values;
}

std::vector<MessageValue> PipelineState::grads_for(const LocalStage& of, const StageWiring::Bundle& bundle,
                                                   const Tensors& grads) const {
  std::vector<MessageValue> values;
  for (int k : places(bundle, grads.size())) {
    const auto& source = of.wiring->sources[layout.dynamic_outputs ? 0 : k];
    values.push_back({grads[k], false, codes_of(grads[k], layout.gradient_format(source))});
  }
  return values;
}

void PipelineState::prepare(LocalStage& stage, Slot& slot) const {
  if (layout.dynamic_outputs) return;  // sized by what arrives
  if (slot.sources.empty()) slot.sources.resize(stage.wiring->sources.size());
  if (training && slot.seeds.empty()) {
    slot.seeds.resize(stage.wiring->sources.size());
    slot.output_grads.resize(stage.num_outputs);
  }
}

// Returns the agreed gradients: those of the values that went the other way.
AgreedValues PipelineState::agreed_grads(const LocalStage& stage, const StageWiring::GradBundle& bundle,
                                         const Slot& slot) const {
  std::vector<AgreedValue> agreed;
  for (const auto& [output, index] : targets_of(bundle, slot.outputs.size())) {
    const auto k = static_cast<size_t>(index);
    const ValueSource value = output ? ValueSource{stage.stage, index} : stage.wiring->sources[k];
    std::optional<GradientMeta> meta;
    if (output && k < slot.outputs.size()) meta = gradient_meta(slot.outputs[k]);
    if (!output && slot.boundary) meta = slot.boundary->gradient_meta(k);
    agreed.push_back(agreed_gradient(meta));
    agreed.back().codes = layout.gradient_format(value);
  }
  return agreed;
}

void PipelineState::receive(const RunAction& run, LocalStage& stage, Slot& slot) {
  const auto& w = *stage.wiring;
  for (size_t i = 0; i < run.receives.size(); i++) {
    if (run.receives[i] < 0) continue;  // was handed over on this rank
    if (run.action.kind != ActionKind::Forward) {
      take_grads(stage, slot, w.grads_in[i].stage,
                 transport
                     .receive(run.receives[i], run.text, agreed_grads(stage, w.grads_in[i], slot),
                              wire_format(layout.wire.bwd))
                     .values);
      continue;
    }
    // The stage checks its values; it may take several kinds.
    AgreedValues agreed;
    if (!layout.dynamic_outputs) agreed.emplace();
    for (int k : w.values_in[i].indices) {
      if (agreed) agreed->emplace_back().codes = layout.value_format(w.sources[k]);
    }
    auto message = transport.receive(run.receives[i], run.text, agreed, wire_format(layout.wire.fwd));
    slot.sizes.merge(unpack_sizes(message.sizes));
    take_values(stage, slot, w.values_in[i].stage, std::move(message.values));
  }
}

void PipelineState::send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs) {
  const auto& bundles = stage.wiring->values_out;
  const auto& sizes = stage.slots[m].sizes;
  for (size_t i = 0; i < bundles.size(); i++) {
    if (run.sends[i] >= 0) {
      transport.send(run.sends[i], values_for(stage.stage, bundles[i], outputs), pack_sizes(sizes));
      continue;
    }
    auto& to = stages.at(bundles[i].stage);
    auto& slot = to.slots[m];
    slot.sizes.insert(sizes.begin(), sizes.end());
    if (slot.values_given_for.count(stage.stage)) continue;
    prepare(to, slot);
    take_values(to, slot, stage.stage, arrived(values_for(stage.stage, bundles[i], outputs)));
  }
}

// Takes them out of the slot.
void PipelineState::deliver_input_grads(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  check_input_grads(stage, slot, m);
  const Tensors grads = std::move(slot.input_grads);
  slot.input_grads.clear();
  const auto& bundles = stage.wiring->grads_out;
  for (size_t i = 0; i < bundles.size(); i++) {
    if (run.sends[i] >= 0) {
      transport.send(run.sends[i], grads_for(stage, bundles[i], grads));
      continue;
    }
    auto& to = stages.at(bundles[i].stage);
    auto& other = to.slots[m];
    if (!other.grads_given_for.count(stage.stage))
      take_grads(to, other, stage.stage, arrived(grads_for(stage, bundles[i], grads)));
  }
  keep_input_grads(stage, m, grads);
}

void PipelineState::forward(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  seed_generator(stage.stage, m);
  std::optional<CheapRecompute> recompute;
  run_function(stage, slot, m, run.backward_is_next ? nullptr : &recompute);
  check_results(stage, slot, m, /*hooked=*/false);
  finish_recompute(stage, slot, recompute);
  send_values(run, stage, m, slot.results);
  keep_for_backward(stage, slot);
}

void PipelineState::backward(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  auto compute = [&] { run_backward(run.action.kind, stage, slot, m); };
  if (run.action.kind == ActionKind::BackwardInput) {
    compute();
  } else {
    stage.gradients->accumulate(m, compute);
  }
  if (run.action.kind == ActionKind::BackwardWeight) return;
  deliver_input_grads(run, stage, slot);
}

// The engine's part after a hook.
void PipelineState::finish_hooked(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  auto require = [&](bool done, const char* what) {
    if (done) return;
    throw Error(ErrorKind::InvalidState, "the function in the place of " + run.text + " left out the " + what, "",
                "call the stage's method for it, or the driver's");
  };
  if (run.action.kind == ActionKind::Forward) {
    require(slot.went_forward, "forward of its stage");
    check_results(stage, slot, m, /*hooked=*/true);
    send_values(run, stage, m, slot.results);
    keep_for_backward(stage, slot);
  } else if (run.action.kind == ActionKind::BackwardWeight) {
    require(!slot.weights_due, "weight half of its stage's backward");
  } else {
    require(slot.went_back, "backward of its stage");
    require(run.action.kind == ActionKind::BackwardInput || !slot.weights_due, "weight half of its stage's backward");
    deliver_input_grads(run, stage, slot);
  }
}

// Calls the hook with the accumulation of all parts around it.
void PipelineState::call_hook(std::span<const RunAction> parts, std::span<const RunAction> left) {
  if (left.empty()) {
    StepDriver driver(*this);
    (*parts.front().hook)(parts.front().hooked, driver);
    return;
  }
  const Action& part = left.front().action;
  auto rest = [&] { call_hook(parts, left.subspan(1)); };
  if (part.kind == ActionKind::FullBackward || part.kind == ActionKind::BackwardWeight) {
    stages.at(part.stage).gradients->accumulate(part.microbatch, rest);
  } else {
    if (part.kind == ActionKind::Forward) seed_generator(part.stage, part.microbatch);
    rest();
  }
}

void PipelineState::run_hook(std::span<const RunAction> parts) {
  call_hook(parts, parts);
  for (const auto& part : parts) {
    if (!part.action.is_compute()) continue;
    auto& stage = stages.at(part.action.stage);
    finish_hooked(part, stage, stage.slots[part.action.microbatch]);
  }
}

void PipelineState::reduce_by_hook(int stage) {
  const ActionHook* hook = find_hook(options.hooks, ActionKind::ReduceGrad, stage);
  if (hook == nullptr || !reduced.insert(stage).second) return;
  RunAction run{Action::of_stage(ActionKind::ReduceGrad, stage)};
  run.text = to_string(run.action);
  run.hook = hook;
  run.hooked = run.action;
  stages.at(stage).gradients->reduce([&] { run_actions({&run, 1}); });
}

void PipelineState::run_actions(std::span<const RunAction> parts) {
  const RunAction& run = parts.front();
  TimelineEvent event{rank(), run.hooked};
  if (options.record_timeline) event.waiting = seconds_now();
  const std::int64_t sent_before = transport.sent();
  const RunAction* at = &run;  // for the error's text
  try {
    for (const auto& part : parts) {
      at = &part;
      if (!part.action.is_compute()) continue;
      auto& stage = stages.at(part.action.stage);
      prepare(stage, stage.slots[part.action.microbatch]);
      receive(part, stage, stage.slots[part.action.microbatch]);
    }
    at = &run;
    if (options.record_timeline) event.start = seconds_now();
    if (run.hook != nullptr) {
      run_hook(parts);
    } else {
      auto& stage = stages.at(run.action.stage);
      auto& slot = stage.slots[run.action.microbatch];
      run.action.kind == ActionKind::Forward ? forward(run, stage, slot) : backward(run, stage, slot);
    }
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::Communication) throw;
    const std::string text = parts.size() > 1 && at == &run ? to_string(run.hooked) : at->text;
    throw Error(e.kind(), str(me(), " at ", text, ": ", e.message()), e.where(), e.remedy());
  } catch (const std::exception& e) {
    throw Error(ErrorKind::ExecutionFailed, str(me(), " at ", at->text, ": ", error_text(e)));
  }
  if (options.record_timeline) {
    event.end = seconds_now();
    event.sent = transport.sent() - sent_before;
    timeline.push_back(event);
  }
}

}  // namespace plumb
