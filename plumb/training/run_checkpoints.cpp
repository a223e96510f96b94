#include "plumb/training/run_checkpoints.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <random>
#include <set>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/checkpoint/optimizer_state.h"
#include "plumb/pipeline/broadcast.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr int kVersion = 1;
constexpr std::chrono::seconds kPatience{3};  // less than the launcher's

NamedTensors as_pairs(const std::vector<NamedTensor>& parameters) {
  NamedTensors pairs;
  for (const NamedTensor& p : parameters) pairs.emplace_back(p.name, p.tensor);
  return pairs;
}

std::string first_name(const TrainJob& job, const std::string& name) {
  const auto found = job.first_names.find(name);
  return found == job.first_names.end() ? name : found->second;
}

}  // namespace

RunCheckpoints::RunCheckpoints(const TrainOptions& o, TrainJob& job, const ProcessGroup& world,
                               const ReplicatedGroups& groups, const std::vector<NamedTensor>& parameters,
                               Optimizer& optimizer)
    : options_(o), job_(job), world_(world), groups_(groups), parameters_(parameters), optimizer_(optimizer) {
  const int rank = groups.pipeline.rank();
  std::set<std::string> taken;  // by first name: the first stage's rank has it
  for (int stage = 0; stage < job.pipe->num_stages(); ++stage) {
    const bool owner = job.schedule.placement.rank_of(stage, 0) == rank;
    bool here = owner;
    for (int m = 0; m < job.schedule.num_microbatches; ++m) {
      here = here || job.schedule.placement.rank_of(stage, m) == rank;
    }
    for (const Attr& attr : job.pipe->stage(stage)->state()) {
      if (attr.kind == AttrKind::Constant) continue;
      const std::string name = first_name(job, attr.name);
      if (here) held_.emplace_back(name, attr.tensor);
      if (taken.insert(name).second && owner) part_.model.emplace_back(name, attr.tensor);
    }
  }
  for (const Attr& attr : job.module().state()) {
    if (attr.kind == AttrKind::Constant) continue;
    const std::string name = first_name(job, attr.name);
    if (name != attr.name) part_.ties[attr.name] = name;
    if (taken.insert(name).second) {  // no stage uses it
      held_.emplace_back(name, attr.tensor);
      if (rank == 0) part_.model.emplace_back(name, attr.tensor);
    }
  }
  part_.unit_scaled = is_unit_scaled();
  for (const auto& [name, tensor] : part_.model) owned_.push_back(name);
  std::sort(owned_.begin(), owned_.end());
  const at::Tensor id = at::full({1}, static_cast<int64_t>(std::random_device()()), at::kLong);
  broadcast(world, id, 0);
  if (groups.replicas.rank() != 0) return;
  CheckpointOptions keep;
  keep.keep_last = static_cast<int>(o.keep_last);
  keep.keep_every = o.keep_every;
  writer_ = std::make_unique<CheckpointWriter>(o.checkpoints, rank, groups.pipeline.size(),
                                               std::to_string(id.item<int64_t>()), keep);
}

bool RunCheckpoints::is_unit_scaled() const { return job_.tagged && !job_.program.unit_scaled_layers; }

nlohmann::json RunCheckpoints::state(int64_t step) const {
  nlohmann::json same;
  for (const TrainField& field : train_fields()) {
    if (field.makes_numbers) same[field.name] = field_texts(options_, field);
  }
  return {{"trainer", kVersion},
          {"step", step},
          {"steps", options_.steps},
          {"rows", job_.rows},
          {"parts", parts_of_step(options_)},
          {"gradient_groups", job_.pipeline.gradient_groups},
          {"data", job_.batches->state()},
          {"data_identity", job_.batches->identity()},
          {"unit_scaled", is_unit_scaled()},
          {"options", same}};
}

void RunCheckpoints::check_same_run(const nlohmann::json& state, const std::string& folder) const {
  const auto refuse = [&](const std::string& what, const std::string& was, const std::string& is) {
    throw UsageError("--resume: " + folder + " is of a run with " + what + " " + was + ", this one has " + is,
                     "the same " + what + ", another --checkpoints folder, or --no-resume");
  };
  if (!state.is_object() || state.value("trainer", nlohmann::json()) != kVersion) {
    throw Error(ErrorKind::BadFile, folder + ": was not written by a training of this version", "",
                "another --checkpoints folder, or --no-resume");
  }
  const nlohmann::json now = this->state(0);
  const nlohmann::json none = nlohmann::json::object();
  const nlohmann::json& options = state.contains("options") ? state["options"] : none;
  for (const auto& [name, value] : now["options"].items()) {
    const nlohmann::json was = options.is_object() ? options.value(name, nlohmann::json()) : nlohmann::json();
    if (was != value) refuse("--" + name, was.dump(), value.dump());
  }
  const std::vector<std::pair<const char*, const char*>> numbers = {
      {"rows", "--batch (rows of a step)"},
      {"parts", "--microbatches x --data-parallel x --accumulate"},
      {"data_identity", "--data (names, sizes, types)"}};
  for (const auto& [key, what] : numbers) {
    const nlohmann::json was = state.value(key, nlohmann::json());
    if (was != now[key]) refuse(what, was.dump(), now[key].dump());
  }
  if (options_.rate != "constant" && state.value("steps", nlohmann::json()) != now["steps"]) {
    refuse("--steps (--rate " + options_.rate + " depends on them)", state.value("steps", nlohmann::json()).dump(),
           now["steps"].dump());
  }
}

// Sums go on in the groups they had, if options name no others.
void RunCheckpoints::take_gradient_groups(const nlohmann::json& state, const std::string& folder) {
  if (options_.gradient_groups > 0) return;
  const nlohmann::json was = state.value("gradient_groups", nlohmann::json());
  const int64_t groups = was.is_number_unsigned() ? was.get<int64_t>() : 0;
  if (groups < 1 || groups > 65536) {
    throw Error(ErrorKind::BadFile, folder + ": " + was.dump() + " is no number of gradient groups", "",
                "--gradient-groups N, or --no-resume");
  }
  try {
    check_gradient_groups(static_cast<int>(groups), static_cast<int>(options_.replicas), job_.schedule);
  } catch (const Error& e) {
    throw UsageError("--resume: " + folder + ": " + e.message(),
                     "--gradient-groups N to go on with sums in another order, that is other last bits");
  }
  job_.pipeline.gradient_groups = static_cast<int>(groups);
}

int64_t RunCheckpoints::resume(std::vector<std::string>& told) {
  if (!options_.resume) return 0;
  std::optional<Checkpoint> checkpoint;
  const at::Tensor step = at::full({1}, -1, at::kLong);
  if (world_.rank() == 0) {
    checkpoint = Checkpoint::newest(options_.checkpoints, &told);
    if (checkpoint) step.fill_(checkpoint->step());
  }
  broadcast(world_, step, 0);
  const auto newest = step.item<int64_t>();
  if (newest < 0) return 0;
  if (!checkpoint) {
    checkpoint = Checkpoint::open((std::filesystem::path(options_.checkpoints) / checkpoint_name(newest)).string());
  }
  const nlohmann::json& state = checkpoint->state();
  check_same_run(state, checkpoint->folder());
  take_gradient_groups(state, checkpoint->folder());
  checkpoint->load(held_);
  if (optimizer_.torch() != nullptr) load_optimizer_state(*optimizer_.torch(), as_pairs(parameters_), *checkpoint);
  job_.batches->load_state(state.value("data", nlohmann::json()));
  last_saved_ = newest;
  return newest;
}

void RunCheckpoints::save(int64_t step, bool now) {
  const bool due = options_.checkpoint_every > 0 && step % options_.checkpoint_every == 0;
  if ((!due && !now) || step == last_saved_) return;
  last_saved_ = step;
  if (!writer_) return;
  CheckpointPart part = part_;
  if (optimizer_.torch() != nullptr) {
    NamedTensors mine;
    for (const NamedTensor& p : parameters_) {
      if (std::binary_search(owned_.begin(), owned_.end(), p.name)) mine.emplace_back(p.name, p.tensor);
    }
    part.optimizer = optimizer_state(*optimizer_.torch(), mine);
  }
  writer_->save(step, part, state(step));
}

void RunCheckpoints::wait() {
  if (writer_) writer_->wait();
}

void RunCheckpoints::abandon() {
  if (!writer_) return;
  // A rank that has raised, and is not dead, ends its part like the others.
  auto done = std::async(std::launch::async, [&] { writer_->wait(); });
  if (done.wait_for(kPatience) != std::future_status::ready) writer_->abandon();
}

std::vector<CheckpointReport> RunCheckpoints::take_reports() {
  return writer_ ? writer_->take_reports() : std::vector<CheckpointReport>();
}

}  // namespace plumb
