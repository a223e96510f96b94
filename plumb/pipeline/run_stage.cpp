// One action of one stage: what it waits for, computes, and hands over.
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/pipeline/describe.h"
#include "plumb/pipeline/runtime_state.h"

namespace plumb {
namespace {

// The first entry that is not finite, as "[2, 5] is nan"; empty if all are.
std::string first_not_finite(const at::Tensor& t) {
  if (!t.defined() || !(t.is_floating_point() || t.is_complex()) || t.numel() == 0) return "";
  const auto finite = at::isfinite(t.detach());
  if (finite.all().item<bool>()) return "";
  const auto flat = finite.reshape(-1);
  int64_t at = at::argmin(flat.to(at::kByte)).item<int64_t>();
  const auto value = t.detach().reshape(-1)[at].item().toDouble();
  std::string index;
  for (int64_t d = t.dim() - 1; d >= 0; d--) {
    index = std::to_string(at % t.size(d)) + (index.empty() ? "" : ", " + index);
    at /= t.size(d);
  }
  return "[" + index + "] is " + std::to_string(value);
}

std::string text(const char* what, int index, int stage, int m) {
  return what + std::to_string(index) + " of stage " + std::to_string(stage) + ", microbatch " + std::to_string(m);
}

}  // namespace

template <typename What>
void Pipeline::State::check_finite(const at::Tensor& t, What what) const {
  if (!options.check_numerics) return;
  const auto bad = first_not_finite(t);
  if (!bad.empty()) throw Error(ErrorKind::Numerics, what() + ": entry " + bad);
}

void Pipeline::State::arrive(Slot& slot, const StageWiring::Bundle& bundle, std::vector<MessageValue> values) const {
  if (layout.open) {
    slot.sources = std::move(values);
    return;
  }
  for (size_t i = 0; i < bundle.indices.size(); i++) slot.sources[bundle.indices[i]] = std::move(values.at(i));
}

void Pipeline::State::arrive(Slot& slot, const StageWiring::GradBundle& bundle,
                             const std::vector<MessageValue>& values) const {
  if (layout.open) {
    slot.output_grads.clear();
    for (const auto& v : values) slot.output_grads.push_back(v.tensor);
    return;
  }
  for (size_t i = 0; i < bundle.targets.size(); i++) {
    const auto& target = bundle.targets[i];
    (target.output ? slot.output_grads : slot.seeds)[target.index] = values.at(i).tensor;
  }
}

void Pipeline::State::open(LocalStage& stage, Slot& slot) {
  if (layout.open) return;  // sized by what arrives
  if (slot.sources.empty()) slot.sources.resize(stage.wiring->sources.size());
  if (training && slot.seeds.empty()) {
    slot.seeds.resize(stage.wiring->sources.size());
    slot.output_grads.resize(stage.num_outputs);
  }
}

void Pipeline::State::receive(const RunAction& run, LocalStage& stage, Slot& slot) {
  const auto& w = *stage.wiring;
  for (size_t i = 0; i < run.receives.size(); i++) {
    if (run.receives[i] < 0) continue;  // was handed over on this rank
    auto values = transport.receive(run.receives[i], run.text);
    const bool forward = run.action.kind == ActionKind::Forward;
    const size_t expected = forward ? w.values_in[i].indices.size() : w.grads_in[i].targets.size();
    if (values.size() != expected && !layout.open) {
      throw Error(ErrorKind::Communication, "a message of " + std::to_string(values.size()) + " values came where " +
                                                std::to_string(expected) + " were agreed");
    }
    if (forward) {
      arrive(slot, w.values_in[i], std::move(values));
    } else {
      arrive(slot, w.grads_in[i], values);
    }
  }
}

void Pipeline::State::gather_inputs(LocalStage& stage, Slot& slot, int m, Tensors& values, std::vector<bool>& wants) {
  const auto& w = *stage.wiring;
  values.reserve(slot.sources.size());
  wants.reserve(slot.sources.size());
  for (size_t i = 0; i < slot.sources.size(); i++) {
    auto& source = slot.sources[i];
    if (!layout.open && w.sources[i].stage < 0) {
      const int index = w.sources[i].index;
      if (inputs->empty() || (*inputs)[m].size() <= static_cast<size_t>(index) || !(*inputs)[m][index].defined()) {
        throw Error(ErrorKind::InvalidArgument,
                    "stage " + std::to_string(stage.stage) + " uses input " + std::to_string(index) +
                        " of the model, and rank " + std::to_string(rank()) + " was not given it",
                    "", "give the input to step() on every rank whose stages use it");
      }
      const auto& input = (*inputs)[m][index];
      source = {input, input.requires_grad()};
    }
    values.push_back(source.tensor);
    wants.push_back(training && source.requires_grad);
  }
  slot.sources.clear();
}

void Pipeline::State::forward(const RunAction& run, LocalStage& stage, Slot& slot) {
  const auto& w = *stage.wiring;
  const int m = run.action.microbatch;
  Tensors values;
  std::vector<bool> wants;
  gather_inputs(stage, slot, m, values, wants);
  auto boundary = std::make_unique<InputBoundary>(values, wants);
  c10::SmallVector<std::int64_t, 8> versions;
  for (const auto& v : values) versions.push_back(v.defined() && !v.is_inference() ? v._version() : 0);
  Tensors in;
  if (layout.open) {
    in = boundary->inputs();
  } else {
    in.reserve(w.source_of_input.size());
    for (int source : w.source_of_input) in.push_back(boundary->inputs()[source]);
  }
  if (options.seed) {
    const int first = options.replicas.rank() * schedule.num_microbatches;
    cpu_generator().set_current_seed(((*options.seed * 1000003 + step_number) * 1000003 + stage.stage) * 1000003 +
                                     first + m);
  }
  std::optional<CheapRecompute> recompute;
  if (training && !run.goes_back_at_once && stage.function->recompute == Recompute::Cheap &&
      stage.recomputed.differing == 0) {
    recompute.emplace(/*check=*/!std::exchange(stage.recompute_checked, true));
  }
  Tensors outputs = stage.function->run(in, m);
  // The last stage's outputs are nobody's inputs; a stage with a loss of its own returns that alone.
  const bool counted = !layout.open && (stage.stage != last_stage() || options.loss || options.return_outputs);
  if (counted && static_cast<int>(outputs.size()) != stage.num_outputs) {
    throw Error(ErrorKind::InvalidArgument, "stage " + std::to_string(stage.stage) + " returned " +
                                                std::to_string(outputs.size()) + " values, its layout says " +
                                                std::to_string(stage.num_outputs));
  }
  for (size_t i = 0; !layout.open && i < values.size(); i++) {
    const auto& source = w.sources[i];
    if (source.stage < 0 || !values[i].defined() || values[i].is_inference()) continue;
    if (values[i]._version() != versions[i] && shared_on_this_rank(source, m))
      raise_write_to_shared(source, stage.stage);
  }
  for (size_t k = 0; k < outputs.size(); k++) {
    check_finite(outputs[k], [&] { return text("output ", static_cast<int>(k), stage.stage, m); });
  }
  if (stage.stage == last_stage()) finish_model(m, outputs, slot);
  if (recompute) {
    recompute->finish(slot.loss.defined() ? Tensors{slot.loss} : outputs);
    stage.recomputed = recompute->report();
    // The stage writes where autograd does not see it: from now on it keeps everything.
    if (stage.recomputed.differing > 0) stage.recomputed.by_operator.clear();
    recompute.reset();
  }
  send_values(run, stage, m, outputs);
  if (!training) return;
  boundary->release_inputs();
  slot.boundary = std::move(boundary);
  if (stage.stage == last_stage()) return;  // only the loss goes backwards
  slot.outputs.resize(outputs.size());
  for (size_t k = 0; k < outputs.size(); k++) {
    if ((layout.open || w.output_used[k]) && outputs[k].defined() && outputs[k].requires_grad()) {
      slot.outputs[k] = backward_handle(outputs[k]);
    }
  }
}

// Whether a value that was handed over in memory has other users here.
bool Pipeline::State::shared_on_this_rank(const ValueSource& source, int m) const {
  if (schedule.placement.rank_of(source.stage, m) != rank()) return false;
  return std::count_if(stages.begin(), stages.end(), [&](const auto& entry) {
           const auto& sources = entry.second.wiring->sources;
           return std::find(sources.begin(), sources.end(), source) != sources.end();
         }) > 1;
}

void Pipeline::State::raise_write_to_shared(const ValueSource& source, int stage) const {
  throw Error(ErrorKind::InvalidArgument,
              "stage " + std::to_string(stage) + " writes in place to output " + std::to_string(source.index) +
                  " of stage " + std::to_string(source.stage) + ", which other stages of the same rank use too",
              "", "clone the value before writing to it");
}

void Pipeline::State::finish_model(int m, const Tensors& outputs, Slot& slot) {
  const bool wanted = training || (options.loss ? !targets->empty() : false);
  if (wanted) {
    at::Tensor loss;
    if (options.loss) {
      loss = options.loss(outputs, targets->empty() ? Tensors{} : (*targets)[m]);
    } else if (options.loss_output >= 0 && static_cast<size_t>(options.loss_output) < outputs.size()) {
      loss = outputs[options.loss_output];
    }
    if (!loss.defined() || loss.numel() != 1 || (training && !loss.requires_grad())) {
      throw Error(ErrorKind::InvalidArgument,
                  "the loss of microbatch " + std::to_string(m) + " is " + describe(loss) +
                      (loss.defined() && loss.numel() == 1 ? " and requires no gradient" : ", not one number"),
                  "", "give PipelineOptions::loss, or a model whose output loss_output is its loss");
    }
    check_finite(loss, [&] { return "the loss of microbatch " + std::to_string(m); });
    losses[m] = loss.detach();
    if (training) slot.loss = loss;
  }
  if (options.return_outputs || !training) {
    for (const auto& o : outputs) model_outputs[m].push_back(o.defined() ? o.detach() : o);
  }
}

void Pipeline::State::send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs) {
  const auto& bundles = stage.wiring->values_out;
  for (size_t i = 0; i < bundles.size(); i++) {
    std::vector<MessageValue> values;
    values.reserve(bundles[i].indices.size());
    auto add = [&](const at::Tensor& t) {
      values.push_back({t.defined() ? t.detach() : t, t.defined() && t.requires_grad()});
    };
    if (layout.open) {
      for (const auto& t : outputs) add(t);
    } else {
      for (int k : bundles[i].indices) add(outputs[k]);
    }
    if (run.sends[i] >= 0) {
      transport.send(run.sends[i], values);
      continue;
    }
    auto& to = stages.at(bundles[i].stage);
    auto& slot = to.slots[m];
    open(to, slot);
    for (const auto& in : to.wiring->values_in) {
      if (in.stage == stage.stage) arrive(slot, in, std::move(values));
    }
  }
}

void Pipeline::State::send_grads(const RunAction& run, LocalStage& stage, int m, const Tensors& grads) {
  const auto& bundles = stage.wiring->grads_out;
  for (size_t i = 0; i < bundles.size(); i++) {
    std::vector<MessageValue> values;
    values.reserve(bundles[i].indices.size());
    if (layout.open) {
      for (const auto& g : grads) values.push_back({g, false});
    } else {
      for (int k : bundles[i].indices) values.push_back({grads[k], false});
    }
    if (run.sends[i] >= 0) {
      transport.send(run.sends[i], values);
      continue;
    }
    auto& to = stages.at(bundles[i].stage);
    auto& slot = to.slots[m];
    for (const auto& in : to.wiring->grads_in) {
      if (in.stage == stage.stage) arrive(slot, in, values);
    }
  }
}

// Outputs with a gradient, and their gradients.
void Pipeline::State::start_of_backward(const LocalStage& stage, const Slot& slot, int m, Tensors& outputs,
                                        Tensors& grads) const {
  if (stage.stage == last_stage()) {
    outputs.push_back(slot.loss);
    grads.push_back(weights[m] == 1 ? at::ones_like(slot.loss) : at::full_like(slot.loss, weights[m]));
    return;
  }
  if (slot.output_grads.size() != slot.outputs.size()) {
    throw Error(ErrorKind::Communication, "stage " + std::to_string(stage.stage) + " handed on " +
                                              std::to_string(slot.outputs.size()) + " values and got gradients for " +
                                              std::to_string(slot.output_grads.size()));
  }
  for (size_t k = 0; k < slot.outputs.size(); k++) {
    if (!slot.outputs[k].defined() || !slot.output_grads[k].defined()) continue;
    outputs.push_back(slot.outputs[k]);
    grads.push_back(slot.output_grads[k]);
  }
}

void Pipeline::State::backward(const RunAction& run, LocalStage& stage, Slot& slot) {
  const int m = run.action.microbatch;
  if (run.action.kind == ActionKind::BackwardWeight) {
    stage.gradients->accumulate(m, [&] {
      if (slot.deferred.pending()) stage_backward_weight(slot.deferred);
      if (slot.own_weight_work) slot.own_weight_work();
    });
    slot = Slot();
    return;
  }
  Tensors outputs, grads;
  start_of_backward(stage, slot, m, outputs, grads);
  Tensors input_grads;
  const bool own_work = stage.function->has_own_weight_work();
  if (run.action.kind == ActionKind::FullBackward) {
    stage.gradients->accumulate(m, [&] {
      input_grads = stage_backward(outputs, grads, *slot.boundary, slot.seeds);
      if (!own_work) return;
      if (auto work = stage.function->own_weight_work()) work();
    });
    slot = Slot();
  } else if (own_work) {
    input_grads = stage_backward(outputs, grads, *slot.boundary, slot.seeds);
    slot = Slot();
    slot.own_weight_work = stage.function->own_weight_work();
  } else {
    auto half = stage_backward_input(outputs, grads, *slot.boundary, slot.seeds);
    input_grads = std::move(half.input_grads);
    slot = Slot();
    slot.deferred = std::move(half.deferred);
  }
  for (size_t i = 0; i < input_grads.size(); i++) {
    check_finite(input_grads[i], [&] { return text("the gradient of input ", static_cast<int>(i), stage.stage, m); });
  }
  send_grads(run, stage, m, input_grads);
  keep_input_grads(stage, m, input_grads);
}

// Of the model's own inputs. Later stages come first, as autograd adds.
void Pipeline::State::keep_input_grads(const LocalStage& stage, int m, const Tensors& grads) {
  const auto& sources = stage.wiring->sources;
  for (size_t i = 0; !layout.open && i < sources.size(); i++) {
    if (sources[i].stage >= 0 || !grads[i].defined()) continue;
    input_grads.resize(schedule.num_microbatches);
    auto& kept = input_grads[m];
    kept.resize(layout.num_inputs);
    auto& sum = kept[sources[i].index];
    sum = sum.defined() ? sum + grads[i] : grads[i];
  }
}

void Pipeline::State::run_action(const RunAction& run) {
  auto& stage = stages.at(run.action.stage);
  auto& slot = stage.slots[run.action.microbatch];
  TimelineEvent event{rank(), run.action};
  if (options.record_timeline) event.waiting = seconds_now();
  try {
    open(stage, slot);
    receive(run, stage, slot);
    if (options.record_timeline) event.start = seconds_now();
    if (run.action.kind == ActionKind::Forward) {
      forward(run, stage, slot);
    } else {
      backward(run, stage, slot);
    }
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::Communication) throw;
    throw Error(e.kind(),
                "rank " + std::to_string(transport.group().world_rank(rank())) + " at " + run.text + ": " + e.message(),
                e.where(), e.remedy());
  } catch (const std::exception& e) {
    throw Error(ErrorKind::InvalidArgument, "rank " + std::to_string(transport.group().world_rank(rank())) + " at " +
                                                run.text + ": " + error_text(e));
  }
  if (options.record_timeline) {
    event.end = seconds_now();
    timeline.push_back(event);
  }
}

}  // namespace plumb
