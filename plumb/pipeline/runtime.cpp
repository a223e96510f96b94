#include "plumb/pipeline/runtime.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/pipeline/runtime_state.h"
#include "plumb/schedule/check.h"

namespace plumb {
namespace {

// An evaluation's table: forwards, and what surrounds use.
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
  layout.check();
  if (schedule.num_stages() != layout.num_stages()) {
    throw Error(ErrorKind::Schedule, "the schedule '" + schedule.name + "' has " +
                                         std::to_string(schedule.num_stages()) + " stages, the model " +
                                         std::to_string(layout.num_stages()));
  }
  if (schedule.num_ranks() != size) {
    throw Error(ErrorKind::Schedule, "the schedule '" + schedule.name + "' is for " +
                                         std::to_string(schedule.num_ranks()) + " ranks, the group has " +
                                         std::to_string(size));
  }
  require_runnable(compute_only(schedule), layout.edges());
  const auto mine = schedule.placement.stages_of(me);
  for (int stage : mine) {
    if (!stages.count(stage) || !stages.at(stage)) {
      throw Error(ErrorKind::Schedule, "rank " + std::to_string(me) + " runs stage " + std::to_string(stage) +
                                           " in the schedule '" + schedule.name + "' and was not given it");
    }
  }
  if (stages.size() != mine.size()) {
    throw Error(ErrorKind::Schedule, "rank " + std::to_string(me) + " was given " + std::to_string(stages.size()) +
                                         " stages, the schedule '" + schedule.name + "' has " +
                                         std::to_string(mine.size()) + " there");
  }
}

// Throws if another rank has another digest, or says instead why it cannot start.
void require_equal(const std::string& digest, Transport& transport, int me) {
  const auto digests = transport.exchange(digest);
  for (size_t r = 0; r < digests.size(); r++) {
    if (digests[r] == digest) continue;
    if (digests[r].substr(0, 1) == "!") {
      throw Error(ErrorKind::Communication, "rank " + std::to_string(me) + " cannot start: rank " + std::to_string(r) +
                                                " failed: " + digests[r].substr(1));
    }
    throw Error(
        ErrorKind::Communication,
        "rank " + std::to_string(me) + " and rank " + std::to_string(r) + " were given different layouts or schedules",
        "", "make both from the same model and arguments on every rank");
  }
}

}  // namespace

void check_gradient_groups(int groups, int replicas, const Schedule& schedule) {
  if (groups == 0 || groups == replicas) return;
  const auto refuse = [&](const std::string& why, const std::string& remedy) {
    throw Error(ErrorKind::InvalidArgument, "gradient_groups is " + std::to_string(groups) + ", but " + why, "",
                remedy);
  };
  if (groups < 0 || groups % replicas != 0)
    refuse("there are " + std::to_string(replicas) + " replicas", "a number of groups that replicas divide");
  // Of other numbers the tree over groups is not one of replicas' trees.
  const int here = groups / replicas;
  if (replicas > 1 && (here & (here - 1)) != 0)
    refuse("each of " + std::to_string(replicas) + " replicas would have " + std::to_string(here),
           "1, 2, 4, 8, ... groups a replica, or one replica");
  if (schedule.num_microbatches % here != 0)
    refuse("each replica has " + std::to_string(schedule.num_microbatches) + " microbatches",
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
    check_parts(layout, schedule, stages, me, s.transport.group().size());
    check_gradient_groups(options.gradient_groups, options.replicas.size(), schedule);
  } catch (const Error& e) {
    // The others wait for this rank: they are told why it does not come.
    try {
      s.transport.exchange("!" + e.message());
    } catch (const std::exception&) {
      // Told as far as possible.
    }
    throw;
  }
  s.wiring = connect_stages(layout);
  s.schedule = compute_only(schedule);
  s.layout = std::move(layout);
  s.options = std::move(options);
  std::string digest = digest_text(s.layout, s.schedule);
  if (s.options.gradient_groups > 0) digest += "gradient groups " + std::to_string(s.options.gradient_groups);
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

struct Batch {
  std::vector<Tensors> inputs, targets;
  std::vector<int64_t> rows;
};

bool any_defined(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined(); });
}

Batch cut(const Tensors& inputs, const Tensors& targets, const PipelineOptions& options, int num) {
  Batch batch;
  if (any_defined(inputs)) {
    auto cut = split_batch(inputs, options.input_chunks, num);
    batch.inputs = std::move(cut.inputs);
    batch.rows = std::move(cut.rows);
  }
  if (any_defined(targets)) {
    auto cut = split_batch(targets, options.target_chunks, num);
    batch.targets = std::move(cut.inputs);
    batch.rows = std::move(cut.rows);  // the loss is over the targets
  }
  return batch;
}

}  // namespace

StepResult Pipeline::step(const Tensors& inputs, const Tensors& targets) {
  auto batch = cut(inputs, targets, state_->options, state_->schedule.num_microbatches);
  return state_->run(batch.inputs, batch.targets, std::move(batch.rows), true);
}

StepResult Pipeline::step_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows, int64_t rows_of_all) {
  return state_->run(inputs, targets, rows, true, rows_of_all);
}

StepResult Pipeline::eval_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows) {
  return state_->run(inputs, targets, rows, false);
}

StepResult Pipeline::eval(const Tensors& inputs, const Tensors& targets) {
  auto batch = cut(inputs, targets, state_->options, state_->schedule.num_microbatches);
  return state_->run(batch.inputs, batch.targets, std::move(batch.rows), false);
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
    throw Error(ErrorKind::InvalidArgument,
                "rank " + std::to_string(rank()) + " has no stage " + std::to_string(stage));
  }
  return it->second.recomputed;
}

const std::vector<TiedParameter>& Pipeline::tied() const { return state_->shared.tied; }
const Schedule& Pipeline::schedule() const { return state_->schedule; }
const PipelineLayout& Pipeline::layout() const { return state_->layout; }
int Pipeline::rank() const { return state_->rank(); }
void Pipeline::set_step(std::int64_t number, std::vector<std::int64_t> rows) {
  const auto wanted = static_cast<size_t>(state_->schedule.num_microbatches) + 1;
  if (!rows.empty() && (rows.size() != wanted || !std::is_sorted(rows.begin(), rows.end()))) {
    throw Error(ErrorKind::InvalidArgument, "set_step() takes where each of " + std::to_string(wanted - 1) +
                                                " microbatches begins, in order, and where the last one ends");
  }
  state_->step_number = number;
  state_->first_rows = std::move(rows);
}
StepDriver Pipeline::driver() { return StepDriver(*state_); }

}  // namespace plumb
