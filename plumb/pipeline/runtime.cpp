#include "plumb/pipeline/runtime.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/runtime_state.h"
#include "plumb/schedule/check.h"

namespace plumb {
namespace {

// Returns an evaluation's table: forwards, and what surrounds use.
Schedule without_backwards(Schedule schedule) {
  for (auto& row : schedule.rows) {
    std::erase_if(row, [](const Action& a) { return a.is_compute() && a.first_part().kind != ActionKind::Forward; });
    for (auto& action : row) action = action.first_part();
  }
  return schedule;
}

std::string digest_text(const PipelineLayout& layout, const Schedule& schedule) {
  return layout.text() + to_csv(schedule);
}

void check_parts(const PipelineLayout& layout, const Schedule& schedule,
                 const std::map<int, std::shared_ptr<StageFunction>>& stages, int me, int size) {
  const auto require = [](bool fits, const std::string& otherwise) {
    if (!fits) throw Error(ErrorKind::Schedule, otherwise);
  };
  const std::string the_schedule = "the schedule '" + schedule.name + "'";
  require(schedule.num_stages() == layout.num_stages(),
          str(the_schedule, " has ", schedule.num_stages(), " stages, the model ", layout.num_stages()));
  require(schedule.num_ranks() == size,
          str(the_schedule, " is for ", schedule.num_ranks(), " ranks, the group has ", size));
  require_runnable(compute_only(schedule), layout.edges());
  const auto mine = schedule.placement.stages_of(me);
  for (int stage : mine) {
    require(stages.count(stage) && stages.at(stage),
            str("rank ", me, " runs stage ", stage, " in ", the_schedule, " and was not given it"));
  }
  require(stages.size() == mine.size(),
          str("rank ", me, " was given ", stages.size(), " stages, ", the_schedule, " has ", mine.size(), " there"));
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
                str("rank ", me, " and rank ", r, " were given different layouts or schedules"), "",
                "make both from the same model and arguments on every rank");
  }
}

}  // namespace

void check_gradient_groups(int groups, int replicas, const Schedule& schedule) {
  if (groups == 0 || groups == replicas) return;
  const auto refuse = [&](const std::string& why, const std::string& remedy) {
    throw Error(ErrorKind::InvalidArgument, str("gradient_groups is ", groups, ", but ", why), "", remedy);
  };
  if (groups < 0 || groups % replicas != 0)
    refuse(str("there are ", replicas, " replicas"), "a number of groups that replicas divide");
  // With another number the tree over groups is not one of replicas' trees.
  const int here = groups / replicas;
  if (replicas > 1 && (here & (here - 1)) != 0)
    refuse(str("each of ", replicas, " replicas would have ", here),
           "1, 2, 4, 8, ... groups a replica, or one replica");
  if (schedule.num_microbatches % here != 0)
    refuse(str("each replica has ", schedule.num_microbatches, " microbatches"),
           "a number of groups that all microbatches divide by");
  for (int m = 1; m < schedule.num_microbatches; m++) {
    for (int stage = 0; stage < schedule.num_stages(); stage++) {
      if (schedule.placement.rank_of(stage, m) != schedule.placement.rank_of(stage, 0))
        refuse("'" + schedule.name + "' runs stages on two ranks, which sum their shares at the end",
               "another schedule, or one group a replica");
    }
  }
}

Pipeline::Pipeline(PipelineLayout layout, Schedule schedule, std::map<int, std::shared_ptr<StageFunction>> stages,
                   ProcessGroup group, PipelineOptions options)
    : state_(std::make_unique<PipelineState>(std::move(group))) {
  auto& s = *state_;
  const int me = s.rank();
  if (options.wire) layout.wire = options.wire;
  try {
    s.wiring = connect_stages(layout);
    check_parts(layout, schedule, stages, me, s.transport.group().size());
    check_gradient_groups(options.gradient_groups, options.replicas.size(), schedule);
  } catch (const Error& e) {
    // The others wait for this rank: they get the reason why it does not come.
    try {
      s.transport.exchange("!" + e.message());
    } catch (const std::exception&) {
      // Told as far as possible.
    }
    throw;
  }
  s.schedule = compute_only(schedule);
  s.layout = std::move(layout);
  s.options = std::move(options);
  std::string digest = digest_text(s.layout, s.schedule);
  if (s.options.gradient_groups > 0) digest += str("gradient groups ", s.options.gradient_groups);
  require_equal(digest, s.transport, me);
  std::map<int, std::vector<NamedTensor>> parameters;
  for (auto& [index, function] : stages) {
    LocalStage local;
    local.stage = index;
    local.function = function;
    local.wiring = &s.wiring[index];
    local.num_outputs = s.layout.stages[index].num_outputs;
    parameters[index] = function->parameters();
    s.stages.emplace(index, std::move(local));
  }
  s.shared = find_shared_parameters(s.layout, parameters, s.transport);
  std::map<int, std::set<int>> shared_indices;
  for (const auto& group_of_copies : s.shared.groups) {
    for (const auto& copy : group_of_copies) {
      if (copy.rank == me) shared_indices[copy.local_stage].insert(copy.index);
    }
  }
  std::map<int, std::vector<NamedTensor>> buffers;
  for (auto& [index, local] : s.stages) {
    std::vector<int> order;
    for (const auto& action : s.schedule.rows[me]) {
      if (action.stage == index &&
          (action.kind == ActionKind::FullBackward || action.kind == ActionKind::BackwardWeight)) {
        order.push_back(action.microbatch);
      }
    }
    const bool separate_step_grads = s.options.replicas.size() > 1 || (s.options.scale_grads && order.size() > 1) ||
                                     find_hook(s.options.hooks, ActionKind::ReduceGrad, index) != nullptr;
    local.gradients =
        std::make_unique<GradientAccumulator>(order, shared_indices[index], separate_step_grads, s.groups_here());
    if (s.groups_here() * s.options.replicas.size() == 1) continue;
    buffers[index] = local.function->written_buffers();
    local.buffers = std::make_unique<GroupBuffers>(buffers[index], s.groups_here(), s.schedule.num_microbatches);
  }
  s.train_plan = plan_run(schedule, s.wiring, me, s.shared.copy_peers, s.options.hooks);
  const Schedule forwards = without_backwards(schedule);
  s.eval_plan = plan_run(forwards, s.wiring, me, {}, s.options.hooks);
  if (s.transport.group().device()) {
    s.transport.connect_device();
    order_messages(s.train_plan, schedule, s.layout.edges(), me);
    order_messages(s.eval_plan, forwards, s.layout.edges(), me);
  }
  if (s.options.replicas.size() > 1) {
    s.replicas =
        std::make_unique<ReplicaSums>(s.options.replicas, digest, parameters, shared_indices, s.train_plan, buffers);
  }
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

namespace {

bool any_defined(const Tensors& tensors) {
  return std::ranges::any_of(tensors, [](const auto& t) { return t.defined(); });
}

StepResult run_batch(PipelineState& state, const Tensors& inputs, const Tensors& targets, bool train) {
  const int num = state.schedule.num_microbatches;
  Microbatches in, out;
  if (any_defined(inputs)) in = split_batch(inputs, state.options.input_chunks, num);
  if (any_defined(targets)) out = split_batch(targets, state.options.target_chunks, num);
  // The loss is over the targets.
  return state.run(in.inputs, out.inputs, out.rows.empty() ? in.rows : out.rows, train);
}

}  // namespace

StepResult Pipeline::step(const Tensors& inputs, const Tensors& targets) {
  return run_batch(*state_, inputs, targets, true);
}

StepResult Pipeline::eval(const Tensors& inputs, const Tensors& targets) {
  return run_batch(*state_, inputs, targets, false);
}

StepResult Pipeline::step_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows, int64_t rows_of_all) {
  return state_->run(inputs, targets, rows, true, rows_of_all);
}

StepResult Pipeline::eval_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows) {
  return state_->run(inputs, targets, rows, false);
}

std::vector<TimelineEvent> Pipeline::gather_timeline() {
  std::vector<TimelineEvent> all;
  for (const auto& text : state_->transport.exchange(to_text(state_->timeline))) {
    for (const auto& e : parse_timeline(text)) all.push_back(e);
  }
  return all;
}

const RecomputeReport& Pipeline::recomputed(int stage) const {
  const auto it = state_->stages.find(stage);
  if (it == state_->stages.end()) {
    throw Error(ErrorKind::InvalidArgument, str("rank ", rank(), " has no stage ", stage));
  }
  return it->second.recomputed;
}

const std::vector<TiedParameter>& Pipeline::tied() const { return state_->shared.tied; }
const Schedule& Pipeline::schedule() const { return state_->schedule; }
const PipelineLayout& Pipeline::layout() const { return state_->layout; }
int Pipeline::rank() const { return state_->rank(); }
void Pipeline::set_step(std::int64_t number, std::vector<std::int64_t> rows) {
  const auto wanted = static_cast<size_t>(state_->schedule.num_microbatches) + 1;
  if (!rows.empty() && (rows.size() != wanted || !std::ranges::is_sorted(rows))) {
    throw Error(ErrorKind::InvalidArgument, str("set_step() takes where each of ", wanted - 1,
                                                " microbatches begins, in order, and where the last one ends"));
  }
  state_->step_number = number;
  state_->first_rows = std::move(rows);
}
StepDriver Pipeline::driver() { return StepDriver(*state_); }

}  // namespace plumb
