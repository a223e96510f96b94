#include "plumb/training/recovery/run_checkpoints.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <random>

#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/core/checksum.h"
#include "plumb/core/input_file.h"
#include "plumb/core/json_text.h"
#include "plumb/core/output_file.h"
#include "plumb/core/text.h"
#include "plumb/graph/describe.h"
#include "plumb/numerics/cpu_kind.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/tensors/parameter_tag.h"
#include "plumb/training/step/gradients.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr int kVersion = 1;
constexpr std::chrono::seconds kPatience{3};  // less than the launcher's
constexpr const char* kRunFile = "run.json";

// Which run the folder is of: its number, and what all its starts have in common. Null where nothing says it.
nlohmann::json read_run(const std::string& folder) {
  const auto path = std::filesystem::path(folder) / kRunFile;
  std::error_code failed;
  if (!std::filesystem::exists(path, failed)) return {};
  try {
    nlohmann::json run = parse_json(read_file(path));
    if (run.is_object() && run.value("run", nlohmann::json()).is_number_integer()) return run;
  } catch (const std::exception&) {
  }
  return {};
}

// Returns the number that plumb's launcher gave all processes of this launch; a new one without it.
int64_t number_of_launch() {
  const auto given = process_variable("PLUMB_RUN");
  const int64_t number = given ? std::strtoll(given->c_str(), nullptr, 10) : std::random_device()();
  return number > 0 ? number : 1;
}

// Returns the operators in their order with what they take, and names, types, sizes and ties of parameters and buffers:
// the same for every export of a model and for every batch size, and none of the values, which the checkpoints have.
std::string fingerprint(const TrainJob& job) {
  std::string text;
  std::unordered_map<const Value*, std::string> names;  // names of values: an attribute's target, or "%" and a number
  for (const Node* node : job.module().graph().nodes()) {
    for (const Value* result : node->results()) {
      names[result] = node->kind() == NodeKind::GetAttr ? node->target() : "%" + std::to_string(names.size());
    }
    if (!node->is_call()) continue;
    text += node->target();
    for (const Value* input : node->inputs()) text += " " + names[input];
    for (const Arg& arg : node->args()) {  // whole numbers are sizes, which a batch may change
      const c10::IValue value = arg.is_constant() ? arg.constant() : c10::IValue();
      if (value.isDouble() || value.isBool() || value.isString()) text += " " + c10::str(value);
    }
    text += "\n";
  }
  for (const Attr& attr : job.module().state()) {
    if (attr.kind == AttrKind::Constant) continue;
    const auto type = at::TensorOptions(attr.tensor.scalar_type());
    text += attr.name + " " + job.first_name(attr.name) + " " + describe(attr.tensor.sizes(), type) + "\n";
  }
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(crc64(text.data(), text.size())));
  return hex;
}

// Returns for each parameter if it has the tag of unit-scaled weights.
nlohmann::json tags(const GraphModule& module) {
  nlohmann::json found = nlohmann::json::object();
  for (const Attr& attr : module.state()) {
    if (attr.kind == AttrKind::Parameter) found[attr.name] = parameter_data(attr.tensor).has_value();
  }
  return found;
}

constexpr int64_t kMostBytes = 512;
constexpr const char* kRead = " (docs/determinism.md)";

std::string shortened(std::string_view text) { return printable(text.substr(0, size_t(kMostBytes))); }

// Returns a checkpoint's record of the machine and the threads that wrote it.
nlohmann::json machine_state(int threads) { return {{"machine", to_string(cpu_kind())}, {"threads", threads}}; }

// Returns "" if `state` says this machine and this number of threads, or says nothing; else a sentence.
std::string machine_changed(const nlohmann::json& state, int threads) {
  const nlohmann::json was = state.is_object() ? state.value("computed_on", nlohmann::json()) : nlohmann::json();
  if (!was.is_object()) return "";
  const nlohmann::json there = was.value("machine", nlohmann::json()), count = was.value("threads", nlohmann::json());
  std::string changed;
  if (there.is_string() && there.get<std::string>() != to_string(cpu_kind()))
    changed = "on " + shortened(there.get<std::string>()) + ", this is " + shortened(to_string(cpu_kind()));
  if (count.is_number_integer() && count.get<int64_t>() != threads)
    changed += (changed.empty() ? "" : "; ") + std::string("with ") + count.dump() + " threads a process, this has " +
               std::to_string(threads);
  return changed.empty() ? "" : "was written " + changed + ": last bits may differ from here on" + kRead;
}

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
  if (groups.replicas.rank() != 0 || o.replay > 0) return;
  CheckpointOptions keep;
  keep.keep_last = static_cast<int>(o.keep_last);
  keep.keep_every = o.keep_every;
  writer_ = std::make_unique<CheckpointWriter>(o.checkpoints, rank, groups.pipeline.size(), std::to_string(id), keep);
}

bool RunCheckpoints::is_unit_scaled() const { return job_.tagged && !job_.program.unit_scaled_layers; }

// Returns the options that another start of the run must have, too.
nlohmann::json RunCheckpoints::same_run() const {
  nlohmann::json same;
  for (const TrainField& field : train_fields()) {
    if (field.makes_numbers) same[field.name] = field_texts(options_, field);
  }
  nlohmann::json run = {{"rows", job_.rows},
                        {"parts", parts_of_step(options_)},
                        {"data_identity", job_.batches->identity()},
                        {"model", fingerprint(job_)},
                        {"options", same}};
  if (options_.rate != "constant") run["steps"] = options_.steps;
  if (job_.formats) run["recipe"] = job_.formats->to_toml();
  return run;
}

nlohmann::json RunCheckpoints::state(int64_t step) const {
  nlohmann::json state = same_run();
  state.update({{"trainer", kVersion},
                {"run", run_},
                {"step", step},
                {"steps", options_.steps},
                {"gradient_groups", job_.pipeline.gradient_groups},
                {"data", job_.batches->state()},
                {"unit_scaled", is_unit_scaled()},
                {"tagged", tags(job_.module())},
                {"computed_on", machine_state(threads_of(options_))}});
  return state;
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
  // Checkpoints of older versions have neither a recipe's text nor a model's fingerprint.
  if (state.contains("recipe") && state["recipe"] != now["recipe"])
    refuse("--formats (the recipe's text)", state["recipe"].dump(), now["recipe"].dump());
  if (state.contains("model") && state["model"] != now["model"]) {
    throw UsageError("--resume: " + folder +
                         " is of another model: its operators, parameters, buffers or ties are not those of " +
                         (options_.file.empty() ? "this one" : options_.file),
                     "the file of that run, another --checkpoints folder, or --no-resume");
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

// On rank 0.
std::optional<Checkpoint> RunCheckpoints::find_own(std::vector<std::string>& told) {
  const int64_t launch = number_of_launch();
  const nlohmann::json before = read_run(options_.checkpoints);
  const int64_t there = before.is_null() ? 0 : before["run"].get<int64_t>();
  run_ = launch;
  if (there != launch && !options_.resume && !launched_again()) return std::nullopt;
  const auto number_of = [](const Checkpoint& checkpoint) -> int64_t {
    const nlohmann::json& state = checkpoint.state();
    const nlohmann::json number = state.is_object() ? state.value("run", nlohmann::json()) : nlohmann::json();
    return number.is_number_integer() ? number.get<int64_t>() : 0;
  };
  constexpr const char* later = "it is not before the step to do again";
  auto newest = Checkpoint::newest(options_.checkpoints, &told, [&](const Checkpoint& checkpoint) {
    if (options_.replay > 0 && checkpoint.step() >= options_.replay) return later;
    return there == 0 || number_of(checkpoint) == there ? "" : "it is of another run than the last one of this folder";
  });
  std::erase_if(told, [&](const std::string& problem) { return problem.find(later) != std::string::npos; });
  begun_ = there != 0 && before.value("same", nlohmann::json()) == same_run();
  if (newest && there == 0 && number_of(*newest) != 0) run_ = number_of(*newest);
  if (there != 0 && (newest || begun_)) run_ = there;
  return newest;
}

int64_t RunCheckpoints::resume(std::vector<std::string>& told, int64_t after) {
  std::optional<Checkpoint> checkpoint;
  if (world_.rank() == 0) checkpoint = find_own(told);
  const int64_t newest = of_rank_0(world_, checkpoint ? checkpoint->step() : -1);
  run_ = of_rank_0(world_, run_);
  begun_ = of_rank_0(world_, begun_ ? 1 : 0) != 0;
  if (newest <= after) return 0;
  if (!checkpoint) {
    checkpoint = Checkpoint::open((std::filesystem::path(options_.checkpoints) / checkpoint_name(newest)).string());
  }
  const nlohmann::json& state = checkpoint->state();
  check_same_run(state, checkpoint->folder());
  if (const std::string changed = machine_changed(state, threads_of(options_)); world_.rank() == 0 && !changed.empty())
    told.push_back(checkpoint->folder() + " " + changed);
  take_gradient_groups(state, checkpoint->folder());
  checkpoint->load(held_);
  optimizer_.load_state(checkpoint->folder(), reader_of(*checkpoint));
  job_.batches->load_state(state.value("data", nlohmann::json()));
  last_saved_ = newest;
  return newest;
}

void RunCheckpoints::begin() {
  if (options_.replay > 0) return;
  largest_of_all(world_, 0);  // a rank that cannot write its history, say, ends the run before it takes the folder
  if (world_.rank() != 0) return;
  const nlohmann::json run = {{"run", run_}, {"same", same_run()}};
  if (read_run(options_.checkpoints) == run) return;
  write_file_atomically(std::filesystem::path(options_.checkpoints) / kRunFile, run.dump(1) + "\n");
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

void RunCheckpoints::make_up(int64_t step, bool now) {
  const int64_t due = options_.checkpoint_every > 0 ? step - step % options_.checkpoint_every : 0;
  std::error_code failed;
  const bool is_there =
      due == 0 || std::filesystem::exists(std::filesystem::path(options_.checkpoints) / checkpoint_name(due), failed);
  save(step, now || of_rank_0(world_, is_there ? 0 : 1) != 0);
}

void RunCheckpoints::wait() {
  if (writer_) writer_->wait();
}

bool RunCheckpoints::has_last() const { return world_.rank() != 0 || !writer_->problem(); }

void RunCheckpoints::require_last() const {
  if (has_last()) return;
  throw Error(ErrorKind::CannotWrite,
              options_.checkpoints + ": the checkpoint of step " + std::to_string(last_saved_) +
                  " was not written, and nothing else keeps the weights",
              "", "make room there and run the same command again: it goes on from the last checkpoint that is whole");
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

std::string other_machines(const ProcessGroup& world) {
  if (world.size() == 1) return "";
  const std::string mine = to_string(cpu_kind());
  const auto number = static_cast<int64_t>(crc64(mine.data(), mine.size()) >> 1);
  const bool differs = of_rank_0(world, number) != number;
  const int64_t first = -largest_of_all(world, differs ? -world.rank() : -world.size());
  if (first >= world.size()) return "";
  const at::Tensor text = at::zeros({kMostBytes}, at::kByte);
  if (world.rank() == first)
    std::memcpy(text.mutable_data_ptr(), mine.data(), std::min(mine.size(), size_t(kMostBytes - 1)));
  broadcast(world, text, static_cast<int>(first));
  return "rank " + std::to_string(first) + " computes on another kind of machine than rank 0 does: " +
         shortened(static_cast<const char*>(text.const_data_ptr())) + "; rank 0: " + shortened(mine) +
         ". The last bits of losses depend on which rank computes what" + kRead;
}

}  // namespace plumb
