// A step: all actions of a rank in order, and what is done with gradients at its end.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/deferred_checks.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/runtime_state.h"
#include "plumb/scaling/fp8.h"

namespace plumb {

// Returns the gradients that another rank's copy must send: by group, as this rank's copy has them.
std::vector<AgreedValue> PipelineState::agreed_with(const CopyGroup& group) const {
  std::vector<AgreedValue> agreed;
  const auto own = std::ranges::find(group, rank(), &ParameterCopy::rank);
  if (own == group.end()) return agreed;
  const auto& stage = stages.at(own->local_stage);
  const at::Tensor parameter = stage.function->parameters()[own->index].tensor;
  for (const at::Tensor& gradient : stage.gradients->group_gradients(own->index))
    agreed.push_back(agreed_gradient(parameter, gradient));
  return agreed;
}

// Sums the gradients of shared parameters over their copies.
void PipelineState::sum_tied_gradients(const RunPlan& plan) {
  if (shared.groups.empty()) return;
  std::map<std::pair<int, const ParameterCopy*>, Tensors> foreign;
  for (size_t i = 0; i < plan.messages.sends.size(); i++) {
    const auto& m = plan.messages.sends[i];
    if (m.id.kind != MessageKind::TiedGradients) continue;
    std::vector<MessageValue> values;
    for (const auto& [group, c] : copies_for_peer(shared, rank(), m.peer)) {
      for (const at::Tensor& g : stages.at(c->local_stage).gradients->group_gradients(c->index))
        values.push_back({g, false});
    }
    transport.send(static_cast<int>(i), values);
  }
  for (size_t i = 0; i < plan.messages.receives.size(); i++) {
    const auto& m = plan.messages.receives[i];
    if (m.id.kind != MessageKind::TiedGradients) continue;
    const auto copies = copies_for_peer(shared, m.peer, rank());
    std::vector<AgreedValue> agreed;
    for (const auto& [group, c] : copies) std::ranges::copy(agreed_with(*group), std::back_inserter(agreed));
    const auto values = transport.receive(static_cast<int>(i), "the end of the step", agreed).values;
    for (size_t k = 0; k < values.size(); k++)
      foreign[{m.peer, copies[k * copies.size() / values.size()].second}].push_back(values[k].tensor);
  }
  at::NoGradGuard no_grad;
  for (const auto& group : shared.groups) {
    Tensors totals;  // by group of microbatches
    for (const auto& copy : group) {
      const Tensors parts = copy.rank == rank() ? stages.at(copy.local_stage).gradients->group_gradients(copy.index)
                                                : foreign[{copy.rank, &copy}];
      totals.resize(parts.size());
      for (size_t k = 0; k < parts.size(); k++) {
        if (!parts[k].defined()) continue;
        totals[k] = totals[k].defined() ? totals[k].add_(parts[k].to(totals[k].device())) : parts[k].clone();
      }
    }
    const at::Tensor total = tree_sum(totals);
    for (const auto& copy : group) {
      if (copy.rank != rank()) continue;
      const auto& stage = stages.at(copy.local_stage);
      const auto own = stage.function->parameters()[copy.index].tensor.device();
      stage.gradients->set_step_gradient(copy.index, total.defined() ? total.to(own) : total);
    }
  }
}

StepResult PipelineState::result(const std::vector<int64_t>& rows) {
  StepResult r;
  r.timeline = timeline;
  r.input_grads = std::move(input_grads);
  if (!stages.count(last_stage())) return r;
  for (const auto& loss : losses) {
    if (loss.defined()) r.losses.push_back(loss);
  }
  r.loss = mean_by_rows(losses, rows);
  const double total = std::accumulate(rows.begin(), rows.end(), 0.0);
  if (groups_here() > 1 && r.loss.defined() && total > 0) {
    r.loss = (sum_by_rows(losses, rows, groups_here()) / total).to(r.loss.scalar_type());
  }
  // In a two-way table this rank has the outputs of some microbatches only.
  std::vector<Tensors> here;
  std::vector<int64_t> rows_here;
  for (size_t m = 0; m < model_outputs.size(); m++) {
    if (model_outputs[m].empty()) continue;
    here.push_back(std::move(model_outputs[m]));
    rows_here.push_back(rows[m]);
  }
  r.outputs = merge_outputs(here, options.output_merges, rows_here);
  return r;
}

void PipelineState::check_batch(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt,
                                const std::vector<int64_t>& rows) const {
  const int num = schedule.num_microbatches;
  for (const auto* list : {&in, &tgt}) {
    if (!list->empty() && static_cast<int>(list->size()) != num) {
      throw Error(ErrorKind::StructureMismatch,
                  str("the schedule has ", num, " microbatches, the batch ", list->size()));
    }
  }
  if (!rows.empty() && static_cast<int>(rows.size()) != num) {
    throw Error(ErrorKind::StructureMismatch, str(rows.size(), " row counts for ", num, " microbatches"));
  }
}

void PipelineState::begin(bool train, const std::vector<int64_t>& rows, int64_t rows_of_all) {
  const int num = schedule.num_microbatches;
  double total = 0;
  for (auto n : rows) total += static_cast<double>(n);
  weights.assign(num, 1);
  if (options.scale_grads) {
    const int microbatches = rows_of_all > 0 ? num * options.replicas.size() : num;
    const double of = rows_of_all > 0 ? static_cast<double>(rows_of_all) : total;
    for (int m = 0; m < num; m++) weights[m] = of > 0 ? static_cast<double>(rows[m]) * microbatches / of : 0;
  }
  training = train;
  batch_rows = rows;
  timeline.clear();
  model_outputs.assign(num, {});
  losses.assign(num, {});
  input_grads.clear();
  reduced.clear();
  for (auto& [s, stage] : stages) {
    stage.slots.clear();
    stage.slots.resize(num);
  }
  const bool weighted = options.scale_grads && !options.average_replicas && rows_of_all == 0;
  if (replicas && train) replicas->begin_step(total, weighted);
}

void PipelineState::run_row(const RunPlan& plan) {
  const std::span<const RunAction> actions(plan.actions);
  for (size_t i = 0; i < actions.size();) {
    if (replicas && training) replicas->check();
    const auto parts = actions.subspan(i, static_cast<size_t>(actions[i].together));
    run_actions(parts);
    for (const auto& part : parts) {
      if (!training || !part.completes_gradients) continue;
      const int stage = part.action.stage;
      if (replicas) replicas->stage_done(stage, *stages.at(stage).gradients);
      // Tied parameters are reduced later, as the sum over their copies.
      if (!options.hooks.empty() && !shared.in_stage(stage)) reduce_by_hook(stage);
    }
    i += parts.size();
    if (options.progress) options.progress(i, actions.size());
  }
}

void PipelineState::finish_buffers(const std::map<int, Tensors>& sums) {
  const int groups = groups_here() * options.replicas.size();
  for (const auto& [s, values] : sums) stages.at(s).buffers->finish_step(values, groups);
}

// The end of a training step: sums over copies and replicas, and the mean.
void PipelineState::finish_gradients(StepResult& done) {
  sum_tied_gradients(train_plan);
  for (auto& [s, stage] : stages) reduce_by_hook(s);
  std::map<int, Tensors> buffers;
  for (auto& [s, stage] : stages) {
    if (stage.buffers) buffers[s] = stage.buffers->sums();
  }
  if (replicas) {
    std::map<int, GradientAccumulator*> accumulators;
    for (auto& [s, stage] : stages) accumulators.emplace(s, stage.gradients.get());
    at::Tensor sum;
    if (done.loss.defined()) sum = sum_by_rows(losses, batch_rows, groups_here());
    replicas->finish(accumulators, sum, buffers);
    if (done.loss.defined())
      done.loss = replicas->loss().defined() ? replicas->loss().to(done.loss.scalar_type()) : at::Tensor();
    for (auto event : options.record_timeline ? replicas->timeline() : std::vector<TimelineEvent>()) {
      event.rank = rank();
      timeline.push_back(event);
    }
  }
  finish_buffers(buffers);
  if (options.record_timeline) done.timeline = timeline;
  const bool mean = options.scale_grads || options.average_replicas;
  const int parts = (options.scale_grads ? schedule.num_microbatches : 1) * (replicas && mean ? replicas->size() : 1);
  for (auto& [s, stage] : stages) stage.gradients->finish_step(reduced.count(s) ? 1 : parts);
  for (auto& grads : done.input_grads) {
    for (auto& g : grads) {
      if (g.defined() && parts > 1) g = g / parts;
    }
  }
}

StepResult PipelineState::run(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt,
                              std::vector<int64_t> rows, bool train, int64_t rows_of_all) {
  check_batch(in, tgt, rows);
  if (rows.empty()) rows.assign(schedule.num_microbatches, 1);
  inputs = &in;
  targets = &tgt;
  const RunPlan& plan = train ? train_plan : eval_plan;
  const KeepWeightCodes cast_once;
  std::vector<std::pair<at::Generator, at::Tensor>> generator_states;
  if (options.seed)
    for (const at::Generator& generator : generators()) generator_states.emplace_back(generator, generator.get_state());
  struct Cleanup {
    PipelineState& s;
    std::vector<std::pair<at::Generator, at::Tensor>> generators;
    ~Cleanup() {
      for (auto& [i, stage] : s.stages) {
        stage.slots.clear();
        stage.gradients->end_step();
      }
      s.inputs = s.targets = nullptr;
      for (auto& [generator, before] : generators) generator.set_state(before);
    }
  } cleanup{*this, std::move(generator_states)};
  c10::AutoGradMode grad_mode(train);
  try {
    begin(train, rows, rows_of_all);
    transport.begin_step(plan.messages);
    if (train) {
      for (auto& [s, stage] : stages) {
        stage.gradients->begin_step(stage.function->parameters());
        if (stage.buffers) stage.buffers->begin_step();
      }
    }
    StepResult done = with_deferred_checks(me() + " at the end of the step: ", [&] {
      run_row(plan);
      return result(rows);
    });
    if (train) finish_gradients(done);
    transport.end_step();
    loss = done.loss;
    step_number++;
    first_rows.clear();
    return done;
  } catch (const std::exception& e) {
    std::exception_ptr error = std::current_exception();
    std::string reason = error_text(e);
    try {
      transport.check_values();
    } catch (const std::exception& lost) {  // that is why
      error = std::current_exception();
      reason = error_text(lost);
    }
    transport.tell_failure(reason);
    if (replicas) replicas->tell_failure(reason);
    std::rethrow_exception(error);
  } catch (...) {
    transport.tell_failure("an exception of unknown type");
    if (replicas) replicas->tell_failure("an exception of unknown type");
    throw;
  }
}

}  // namespace plumb
