#include "plumb/pipeline/runtime/step_runner.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/graph/describe.h"
#include "plumb/scaling/fp8.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/lower.h"
#include "plumb/tensors/deferred_checks.h"
#include "plumb/tensors/node_seeds.h"

namespace plumb {
namespace {

// Returns the text of everything that all ranks must have alike.
std::string digest_text(const PipelineSetup& setup) {
  const PipelineOptions& o = setup.options;
  return setup.layout.text() + to_csv(setup.schedule) +
         str("gradient groups ", o.gradient_groups > 0 ? o.gradient_groups : o.replicas.size(), ", scale_grads ",
             o.scale_grads, ", average_replicas ", o.average_replicas, "\n");
}

void check_parts(const std::vector<StageWiring>& wiring, const Schedule& schedule,
                 const std::map<int, std::shared_ptr<StageFunction>>& stages, int me, int size) {
  const auto require = [](bool fits, const std::string& otherwise) {
    if (!fits) throw Error(ErrorKind::Schedule, otherwise);
  };
  const std::string the_schedule = "the schedule '" + schedule.name + "'";
  require(schedule.num_stages() == static_cast<int>(wiring.size()),
          str(the_schedule, " has ", schedule.num_stages(), " stages, the model ", wiring.size()));
  require(schedule.num_ranks() == size,
          str(the_schedule, " is for ", schedule.num_ranks(), " ranks, the group has ", size));
  require_runnable(compute_only(schedule), edges_of(wiring));
  const auto mine = schedule.placement.stages_of(me);
  for (int stage : mine) {
    require(stages.count(stage) && stages.at(stage),
            str("rank ", me, " runs stage ", stage, " in ", the_schedule, " and was not given it"));
  }
  require(stages.size() == mine.size(),
          str("rank ", me, " was given ", stages.size(), " stages, ", the_schedule, " has ", mine.size(), " there"));
  for (const auto& [stage, function] : stages) {
    for (const NamedTensor& parameter : function->parameters()) {
      if (parameter.tensor.defined()) continue;
      throw Error(ErrorKind::InvalidArgument,
                  str("parameter '", parameter.name, "' of stage ", stage, " is an undefined tensor"), "",
                  "give the stage the tensor, or leave the parameter out");
    }
  }
}

// Throws if another rank has another digest, or says instead why it cannot start.
void require_equal(const std::string& digest, Transport& transport, int me) {
  const auto digests = transport.exchange(digest);
  for (size_t r = 0; r < digests.size(); r++) {
    if (digests[r] == digest) continue;
    if (digests[r].substr(0, 1) == "!") {
      throw Error(ErrorKind::Communication,
                  str("rank ", me, " cannot start: rank ", r, " failed: ", digests[r].substr(1)));
    }
    throw Error(ErrorKind::Communication,
                str("rank ", me, " and rank ", r, " were given different layouts or schedules, or other options"), "",
                "make both from the same model and arguments on every rank; a cut that is measured (\"balanced\") is "
                "another on each: take \"estimated\", or the file of a plan");
  }
}

// Throws Error(InvalidArgument) that names a hook that has no function, or whose stage the model does not have.
void check_hooks(const ActionHooks& hooks, int num_stages) {
  for (const auto& [point, hook] : hooks) {
    const bool there = point.stage >= HookPoint::kEveryStage && point.stage < num_stages;
    if (hook && there) continue;
    const std::string kind(to_string(point.kind));
    throw Error(ErrorKind::InvalidArgument,
                there ? "the hook of " + kind + " has no function"
                      : str("a hook of ", kind, " is for stage ", point.stage, ", the model has ", num_stages),
                "", "give it a function, and a stage of the model or HookPoint::kEveryStage");
  }
}

// Throws on every rank if this one cannot start.
PipelineSetup make_setup(PipeTable layout, const Schedule& schedule,
                         const std::map<int, std::shared_ptr<StageFunction>>& functions, PipelineOptions options,
                         Transport& transport) {
  const int me = transport.group().rank();
  if (options.wire) layout.wire = options.wire;
  PipelineSetup setup;
  try {
    setup.wiring = connect_stages(layout);
    check_parts(setup.wiring, schedule, functions, me, transport.group().size());
    check_gradient_groups(options.gradient_groups, options.replicas.size(), schedule);
    check_merges(options.output_merges);
    check_hooks(options.hooks, layout.num_stages());
  } catch (const std::exception& e) {
    // The others wait for this rank: they get the reason why it does not come.
    try {
      const auto* error = dynamic_cast<const Error*>(&e);
      transport.exchange("!" + (error ? error->message() : error_text(e)));
    } catch (const std::exception&) {
      // Told as far as possible.
    }
    throw;
  }
  setup.layout = std::move(layout);
  setup.schedule = compute_only(schedule);
  setup.options = std::move(options);
  setup.rank = me;
  require_equal(digest_text(setup), transport, me);
  return setup;
}

}  // namespace

StepRunner::StepRunner(PipeTable layout, const Schedule& schedule,
                       const std::map<int, std::shared_ptr<StageFunction>>& functions, ProcessGroup group,
                       PipelineOptions options)
    : transport_(std::move(group)),
      runner_(make_setup(std::move(layout), schedule, functions, std::move(options), transport_), functions),
      setup_(runner_.setup),
      actions_(runner_, transport_) {
  transport_.connect_host(/*may_look=*/true);
  std::map<int, std::vector<NamedTensor>> parameters, buffers;
  for (const auto& [index, function] : functions) parameters[index] = function->parameters();
  shared_ = find_shared_parameters(setup_.layout, parameters, transport_);
  std::map<int, std::set<int>> shared_indices;
  for (const auto& group_of_copies : shared_.groups) {
    for (const auto& copy : group_of_copies) {
      if (copy.rank == setup_.rank) shared_indices[copy.local_stage].insert(copy.index);
    }
  }
  const int groups = setup_.groups_here();
  for (auto& [index, local] : runner_.stages) {
    local.gradients = make_accumulator(index, shared_indices[index]);
    const std::optional<int> other = other_rank_of(index);
    // Buffers are summed over a stage's two ranks also where it has no parameters.
    if (other) shared_.copy_peers[setup_.rank][*other] = shared_.copy_peers[*other][setup_.rank] = true;
    if (groups * setup_.options.replicas.size() == 1 && !other) continue;
    buffers[index] = local.function->written_state();
    local.buffers = std::make_unique<GroupBuffers>(buffers[index], groups, setup_.schedule.num_microbatches);
  }
  train_plan_ = plan_run(schedule, setup_.wiring, setup_.rank, shared_.copy_peers, setup_.options.hooks);
  const Schedule forwards = forward_only(schedule);
  eval_plan_ = plan_run(forwards, setup_.wiring, setup_.rank, {}, setup_.options.hooks);
  if (transport_.group().device()) {
    transport_.connect_device();
    order_messages(train_plan_, schedule, setup_.wiring, setup_.rank);
    order_messages(eval_plan_, forwards, setup_.wiring, setup_.rank);
  }
  if (setup_.options.replicas.size() > 1) {
    replicas_ = std::make_unique<ReplicaSums>(setup_.options.replicas, digest_text(setup_), parameters, shared_indices,
                                              train_plan_, buffers);
  }
}

std::unique_ptr<GradientAccumulator> StepRunner::make_accumulator(int stage, const std::set<int>& shared) const {
  std::vector<int> order;
  for (const auto& action : setup_.schedule.rows[setup_.rank]) {
    if (action.stage == stage &&
        (action.kind == ActionKind::FullBackward || action.kind == ActionKind::BackwardWeight)) {
      order.push_back(action.microbatch);
    }
  }
  const PipelineOptions& options = setup_.options;
  const bool separate_step_grads = options.replicas.size() > 1 || (options.scale_grads && order.size() > 1) ||
                                   find_hook(options.hooks, ActionKind::ReduceGrad, stage) != nullptr;
  return std::make_unique<GradientAccumulator>(order, shared, separate_step_grads, setup_.groups_here(),
                                               options.gradient_changed);
}

// The gradients of another rank's copy, by group, are those of this rank's copy, too.
std::vector<AgreedValue> StepRunner::agreed_with(const CopyGroup& group) const {
  std::vector<AgreedValue> agreed;
  const auto own = std::ranges::find(group, setup_.rank, &ParameterCopy::rank);
  if (own == group.end()) return agreed;
  const auto& stage = runner_.stages.at(own->local_stage);
  const at::Tensor parameter = stage.function->parameters()[own->index].tensor;
  for (const at::Tensor& gradient : stage.gradients->group_gradients(own->index))
    agreed.push_back(agreed_gradient(parameter, gradient));
  return agreed;
}

// Returns the rank on which a two-way table runs the stage's other microbatches.
std::optional<int> StepRunner::other_rank_of(int stage) const {
  const Placement& placement = setup_.schedule.placement;
  if (placement.reverse_ranks.empty() || placement.reverse_ranks[stage] == placement.ranks[stage]) return std::nullopt;
  return placement.ranks[stage] == setup_.rank ? placement.reverse_ranks[stage] : placement.ranks[stage];
}

// Returns the buffers of the stages that `peer` runs, too, each with its stage.
std::vector<std::pair<int, at::Tensor*>> StepRunner::buffers_with(int peer, std::map<int, Tensors>& buffers) const {
  std::vector<std::pair<int, at::Tensor*>> found;
  for (auto& [stage, values] : buffers) {
    if (other_rank_of(stage) != peer) continue;
    for (at::Tensor& value : values) found.emplace_back(stage, &value);
  }
  return found;
}

// Sums the gradients of shared parameters over their copies, and `buffers` over the two ranks of a stage: whole numbers
// are those of the first microbatches.
void StepRunner::sum_copies(const RunPlan& plan, std::map<int, Tensors>& buffers) {
  std::map<std::pair<int, const ParameterCopy*>, Tensors> foreign;
  for (size_t i = 0; i < plan.messages.sends.size(); i++) {
    const auto& m = plan.messages.sends[i];
    if (m.id.kind != MessageKind::TiedGradients) continue;
    std::vector<MessageValue> values;
    for (const auto& [group, c] : copies_for_peer(shared_, setup_.rank, m.peer)) {
      for (const at::Tensor& g : runner_.stages.at(c->local_stage).gradients->group_gradients(c->index))
        values.push_back({g, false});
    }
    for (const auto& [stage, buffer] : buffers_with(m.peer, buffers)) values.push_back({*buffer, false});
    transport_.send(static_cast<int>(i), values);
  }
  for (size_t i = 0; i < plan.messages.receives.size(); i++) {
    const auto& m = plan.messages.receives[i];
    if (m.id.kind != MessageKind::TiedGradients) continue;
    const auto copies = copies_for_peer(shared_, m.peer, setup_.rank);
    std::vector<AgreedValue> agreed;
    for (const auto& [group, c] : copies) std::ranges::copy(agreed_with(*group), std::back_inserter(agreed));
    const size_t gradients = agreed.size();
    const auto own = buffers_with(m.peer, buffers);
    for (const auto& [stage, buffer] : own)
      agreed.push_back({AgreedValue::Comes::Always, buffer->scalar_type(), buffer->sizes().vec()});
    const auto values = transport_.receive(static_cast<int>(i), "the end of the step", agreed).values;
    for (size_t k = 0; k < gradients; k++)
      foreign[{m.peer, copies[k * copies.size() / gradients].second}].push_back(values[k].tensor);
    for (size_t k = 0; k < own.size(); k++) {
      const auto& [stage, buffer] = own[k];
      const at::Tensor theirs = values[gradients + k].tensor.to(buffer->device());
      if (buffer->is_floating_point())
        *buffer = *buffer + theirs;
      else if (setup_.schedule.placement.rank_of(stage, 0) == m.peer)
        *buffer = theirs;
    }
  }
  at::NoGradGuard no_grad;
  for (const auto& group : shared_.groups) {
    Tensors totals;  // by group of microbatches
    for (const auto& copy : group) {
      const Tensors parts = copy.rank == setup_.rank
                                ? runner_.stages.at(copy.local_stage).gradients->group_gradients(copy.index)
                                : foreign[{copy.rank, &copy}];
      totals.resize(parts.size());
      for (size_t k = 0; k < parts.size(); k++) {
        if (!parts[k].defined()) continue;
        totals[k] = totals[k].defined() ? totals[k].add_(parts[k].to(totals[k].device())) : parts[k].clone();
      }
    }
    const at::Tensor total = tree_sum(totals);
    for (const auto& copy : group) {
      if (copy.rank != setup_.rank) continue;
      const auto& stage = runner_.stages.at(copy.local_stage);
      const auto own = stage.function->parameters()[copy.index].tensor.device();
      stage.gradients->set_step_gradient(copy.index, total.defined() ? total.to(own) : total);
    }
  }
}

StepResult StepRunner::result() {
  StepBatch& batch = runner_.batch;
  const std::vector<int64_t>& rows = batch.rows;
  StepResult r;
  r.timeline = actions_.timeline;
  r.input_grads = std::move(batch.input_grads);
  if (!runner_.stages.count(setup_.last_stage())) return r;
  for (const auto& loss : batch.losses) {
    if (loss.defined()) r.losses.push_back(loss);
  }
  r.loss = mean_by_rows(batch.losses, rows);
  const double total = std::accumulate(rows.begin(), rows.end(), 0.0);
  if (setup_.groups_here() > 1 && r.loss.defined() && total > 0) {
    r.loss = (sum_by_rows(batch.losses, rows, setup_.groups_here()) / total).to(r.loss.scalar_type());
  }
  // In a two-way table this rank has the outputs of some microbatches only.
  std::vector<Tensors> here;
  std::vector<int64_t> rows_here;
  for (size_t m = 0; m < batch.outputs.size(); m++) {
    if (batch.outputs[m].empty()) continue;
    here.push_back(std::move(batch.outputs[m]));
    rows_here.push_back(rows[m]);
  }
  r.outputs = merge_outputs(here, setup_.options.output_merges, rows_here);
  return r;
}

void StepRunner::check_batch(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt,
                             const std::vector<int64_t>& rows) const {
  const int num = setup_.schedule.num_microbatches;
  for (const auto* list : {&in, &tgt}) {
    if (!list->empty() && static_cast<int>(list->size()) != num) {
      throw Error(ErrorKind::StructureMismatch,
                  str("the schedule has ", num, " microbatches, the batch ", list->size()));
    }
  }
  const size_t most = setup_.layout.num_inputs;
  const auto more = std::ranges::find_if(in, [&](const Tensors& inputs) { return inputs.size() > most; });
  if (!setup_.layout.dynamic_outputs && more != in.end()) {
    throw Error(ErrorKind::StructureMismatch,
                str("rank ", setup_.rank, " was given ", more->size(), " inputs, and the model takes ", most), "",
                "give step() the model's inputs only");
  }
  if (!rows.empty() && static_cast<int>(rows.size()) != num) {
    throw Error(ErrorKind::StructureMismatch, str(rows.size(), " row counts for ", num, " microbatches"));
  }
  if (std::ranges::any_of(rows, [](int64_t n) { return n < 0; }))
    throw Error(ErrorKind::InvalidArgument, "a microbatch has a negative number of rows");
}

void StepRunner::begin(bool train, StepBatch batch, int64_t rows_of_all) {
  const int num = setup_.schedule.num_microbatches;
  double total = 0;
  for (auto n : batch.rows) total += static_cast<double>(n);
  batch.weights.assign(num, 1);
  if (setup_.options.scale_grads) {
    const int microbatches = rows_of_all > 0 ? num * setup_.options.replicas.size() : num;
    const double of = rows_of_all > 0 ? static_cast<double>(rows_of_all) : total;
    for (int m = 0; m < num; m++)
      batch.weights[m] = of > 0 ? static_cast<double>(batch.rows[m]) * microbatches / of : 0;
  }
  runner_.training = train;
  loss_ = at::Tensor();
  batch.outputs.resize(num);
  batch.losses.resize(num);
  runner_.batch = std::move(batch);
  actions_.begin_step();
  for (auto& [s, stage] : runner_.stages) {
    stage.slots.clear();
    stage.slots.resize(num);
  }
  const bool weighted = setup_.options.scale_grads && !setup_.options.average_replicas && rows_of_all == 0;
  if (replicas_ && train) replicas_->begin_step(total, weighted);
}

void StepRunner::run_row(const RunPlan& plan) {
  const std::span<const RunAction> actions(plan.actions);
  for (size_t i = 0; i < actions.size();) {
    if (replicas_ && runner_.training) replicas_->check();
    const auto parts = actions.subspan(i, static_cast<size_t>(actions[i].together));
    actions_.run(parts);
    for (const auto& part : parts) {
      if (!runner_.training || !part.completes_gradients) continue;
      const int stage = part.action.stage;
      if (replicas_) replicas_->stage_done(stage, *runner_.stages.at(stage).gradients);
      // Tied parameters are reduced later, as the sum over their copies.
      if (!setup_.options.hooks.empty() && !shared_.in_stage(stage)) actions_.reduce_by_hook(stage);
    }
    i += parts.size();
    if (setup_.options.progress) setup_.options.progress(i, actions.size());
  }
}

// The end of a training step: sums over copies and replicas, and the mean.
void StepRunner::finish_gradients(StepResult& done) {
  std::map<int, Tensors> buffers;
  for (auto& [s, stage] : runner_.stages) {
    if (stage.buffers) buffers[s] = stage.buffers->sums();
  }
  sum_copies(train_plan_, buffers);
  for (auto& [s, stage] : runner_.stages) actions_.reduce_by_hook(s);
  if (replicas_) {
    std::map<int, GradientAccumulator*> accumulators;
    for (auto& [s, stage] : runner_.stages) accumulators.emplace(s, stage.gradients.get());
    at::Tensor sum;
    if (done.loss.defined()) sum = sum_by_rows(runner_.batch.losses, runner_.batch.rows, setup_.groups_here());
    replicas_->finish(accumulators, sum, buffers);
    if (done.loss.defined())
      done.loss = replicas_->loss().defined() ? replicas_->loss().to(done.loss.scalar_type()) : at::Tensor();
    for (auto event : setup_.options.record_timeline ? replicas_->timeline() : std::vector<TimelineEvent>()) {
      event.rank = setup_.rank;
      actions_.timeline.push_back(event);
    }
  }
  const int groups = setup_.groups_here() * setup_.options.replicas.size();
  for (const auto& [s, values] : buffers)
    runner_.stages.at(s).buffers->finish_step(values, groups * (other_rank_of(s) ? 2 : 1));
  if (setup_.options.record_timeline) done.timeline = actions_.timeline;
  const bool mean = setup_.options.scale_grads || setup_.options.average_replicas;
  const int parts =
      (setup_.options.scale_grads ? setup_.schedule.num_microbatches : 1) * (replicas_ && mean ? replicas_->size() : 1);
  for (auto& [s, stage] : runner_.stages) stage.gradients->finish_step(actions_.is_reduced(s) ? 1 : parts);
  for (auto& grads : done.input_grads) {
    for (auto& g : grads) {
      if (g.defined() && parts > 1 && setup_.options.scale_input_grads) g = g / parts;
    }
  }
}

StepResult StepRunner::run(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt, std::vector<int64_t> rows,
                           bool train, int64_t rows_of_all) {
  check_batch(in, tgt, rows);
  if (rows.empty()) rows.assign(setup_.schedule.num_microbatches, 1);
  const int64_t own_rows = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (rows_of_all < 0 || (rows_of_all > 0 && rows_of_all < own_rows)) {
    throw Error(ErrorKind::InvalidArgument,
                str("all replicas together have ", rows_of_all, " rows, this one alone ", own_rows), "",
                "give the sum over all replicas, or 0");
  }
  const RunPlan& plan = train ? train_plan_ : eval_plan_;
  const KeepWeightCodes cast_once;
  std::vector<std::pair<at::Generator, at::Tensor>> generator_states;
  if (setup_.options.seed)
    for (const at::Generator& generator : runner_.generators())
      generator_states.emplace_back(generator, generator_state(generator));
  struct Cleanup {
    StageRunner& s;
    std::vector<std::pair<at::Generator, at::Tensor>> generators;
    ~Cleanup() {
      for (auto& [i, stage] : s.stages) {
        stage.slots.clear();
        stage.gradients->end_step();
      }
      s.batch.inputs = s.batch.targets = nullptr;
      for (const auto& [generator, before] : generators) set_generator_state(generator, before);
    }
  } cleanup{runner_, std::move(generator_states)};
  c10::AutoGradMode grad_mode(train);
  try {
    begin(train, {&in, &tgt, std::move(rows)}, rows_of_all);
    transport_.begin_step(plan.messages);
    if (train) {
      for (auto& [s, stage] : runner_.stages) {
        stage.gradients->begin_step(stage.function->parameters());
        if (stage.buffers) stage.buffers->begin_step();
      }
    }
    StepResult done = with_deferred_checks(me() + " at the end of the step: ", [&] {
      run_row(plan);
      return result();
    });
    if (train) finish_gradients(done);
    transport_.end_step();
    loss_ = done.loss;
    runner_.step_number++;
    runner_.first_rows.clear();
    return done;
  } catch (const std::exception& e) {
    std::exception_ptr error = std::current_exception();
    std::string reason = error_text(e);
    try {
      transport_.check_values();
    } catch (const std::exception& lost) {  // that is why
      error = std::current_exception();
      reason = error_text(lost);
    }
    transport_.tell_failure(reason);
    if (replicas_) replicas_->tell_failure(reason);
    std::rethrow_exception(error);
  } catch (...) {
    transport_.tell_failure("an exception of unknown type");
    if (replicas_) replicas_->tell_failure("an exception of unknown type");
    throw;
  }
}

std::vector<TimelineEvent> StepRunner::gather_timeline() {
  std::vector<TimelineEvent> all;
  for (const auto& text : transport_.exchange(to_text(actions_.timeline))) {
    for (const auto& e : parse_timeline(text)) all.push_back(e);
  }
  return all;
}

}  // namespace plumb
