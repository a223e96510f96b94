#include "plumb/training/run_checkpoints.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <random>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr int kVersion = 1;
constexpr std::chrono::seconds kPatience{3};  // less than the launcher's

}  // namespace

RunCheckpoints::RunCheckpoints(const TrainOptions& o, TrainJob& job, const ProcessGroup& world,
                               const ReplicatedGroups& groups, Optimizer& optimizer)
    : options_(o), job_(job), world_(world), groups_(groups), optimizer_(optimizer) {
  const int rank = groups.pipeline.rank();
  const std::vector<int> own_stages = job.schedule.placement.stages_of(rank);
  std::set<std::string> taken;  // by first name: the first stage's rank has it
  for (int stage = 0; stage < job.pipe->num_stages(); ++stage) {
    const bool owner = job.schedule.placement.rank_of(stage, 0) == rank;
    const bool here = std::ranges::count(own_stages, stage) > 0;
    for (const Attr& attr : job.pipe->stage(stage)->state()) {
      if (attr.kind == AttrKind::Constant) continue;
      const std::string name = job.first_name(attr.name);
      if (here) held_.emplace_back(name, attr.tensor);
      if (taken.insert(name).second && owner) part_.model.emplace_back(name, attr.tensor);
    }
  }
  for (const Attr& attr : job.module().state()) {
    if (attr.kind == AttrKind::Constant) continue;
    const std::string name = job.first_name(attr.name);
    if (name != attr.name) part_.ties[attr.name] = name;
    if (taken.insert(name).second) {  // no stage uses it
      held_.emplace_back(name, attr.tensor);
      if (rank == 0) part_.model.emplace_back(name, attr.tensor);
    }
  }
  part_.unit_scaled = is_unit_scaled();
  for (const auto& [name, tensor] : part_.model) owned_.insert(name);
  const int64_t id = of_rank_0(world, std::random_device()());
  if (groups.replicas.rank() != 0) return;
  CheckpointOptions keep;
  keep.keep_last = static_cast<int>(o.keep_last);
  keep.keep_every = o.keep_every;
  writer_ = std::make_unique<CheckpointWriter>(o.checkpoints, rank, groups.pipeline.size(), std::to_string(id), keep);
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
  if (world_.rank() == 0) checkpoint = Checkpoint::newest(options_.checkpoints, &told);
  const int64_t newest = of_rank_0(world_, checkpoint ? checkpoint->step() : -1);
  if (newest < 0) return 0;
  if (!checkpoint) {
    checkpoint = Checkpoint::open((std::filesystem::path(options_.checkpoints) / checkpoint_name(newest)).string());
  }
  const nlohmann::json& state = checkpoint->state();
  check_same_run(state, checkpoint->folder());
  take_gradient_groups(state, checkpoint->folder());
  checkpoint->load(held_);
  optimizer_.load_state(checkpoint->folder(), reader_of(*checkpoint));
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
  part.optimizer = optimizer_.state([&](const std::string& name) { return owned_.contains(name); });
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
