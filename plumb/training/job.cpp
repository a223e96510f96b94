#include "plumb/training/job.h"

#include <ATen/ATen.h>

#include <filesystem>

#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/partition/size_policy.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/recording/history.h"
#include "plumb/recording/rules.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"
#include "plumb/tensors/parameter_tag.h"
#include "plumb/training/cut.h"
#include "plumb/training/folder_weights.h"
#include "plumb/training/recovery/audit.h"
#include "plumb/training/reports/run_log.h"
#include "plumb/training/stages.h"
#include "plumb/training/step/loss.h"
#include "plumb/training/step/optimizer.h"
#include "plumb/training/usage.h"
#include "plumb/training/verdict_run.h"
#include "plumb/transforms/module.h"

namespace plumb {
namespace {

// By name, or a table in a file.
Schedule read_schedule(const TrainOptions& o) {
  const auto stages = static_cast<int>(o.stages), microbatches = static_cast<int>(o.microbatches);
  if (!o.schedule.ends_with(".csv")) {
    return used_by(
        "--schedule " + o.schedule,
        [&] { return make_schedule(schedule_traits(o.schedule).name, stages, microbatches); }, "--schedule 1F1B");
  }
  Schedule schedule = read_csv(o.schedule);
  if (schedule.num_ranks() != stages || schedule.num_microbatches != microbatches) {
    throw UsageError(c10::str("--schedule ", o.schedule, ": is for ", schedule.num_ranks(), " processes and ",
                              schedule.num_microbatches, " microbatches"),
                     c10::str("--stages ", schedule.num_ranks(), " --microbatches ", schedule.num_microbatches));
  }
  return schedule;
}

// A folder that is made when it is needed: what is there already of its path can be written.
void check_folder(const std::string& option, const std::string& path) {
  if (path.empty()) return;
  std::filesystem::path folder = path;
  std::error_code ignored;
  while (std::filesystem::symlink_status(folder, ignored).type() == std::filesystem::file_type::not_found) {
    folder = folder.has_parent_path() ? folder.parent_path() : ".";
  }
  const std::string inside = (folder / ".plumb.tried").string();
  try {
    const OutputFile probe(inside);
  } catch (const Error& e) {
    throw Error(e.kind(), option + " " + path + e.message().substr(inside.size()), "", e.remedy());
  }
}

void check_outputs(const TrainOptions& o) {
  if (!o.save.empty() && !o.save.ends_with(".pt2")) {
    throw UsageError("--save " + o.save + ": is no .pt2 name", "--save OUT.pt2");
  }
  const std::vector<std::string> inputs = {o.file,         o.data,     o.targets, o.mask, o.eval_data,
                                           o.eval_targets, o.schedule, o.record,  o.plan};
  std::vector<std::pair<std::string, std::string>> outputs = {
      {"--save", o.save},        {"--options", o.options},           {"--csv", o.csv},
      {"--page", o.page},        {"--verdict-page", o.verdict_page}, {"--verdict-recipe", o.verdict_recipe},
      {"--timeline", o.timeline}};
  for (int rank = 0; rank < o.stages && !o.history.empty(); ++rank)
    outputs.emplace_back("--history", history_file(o, rank));
  for (int rank = 0; rank < o.processes() && !o.hashes.empty(); ++rank)
    outputs.emplace_back("--hashes", hashes_file(o, rank, {}));
  check_writable(outputs, inputs);
  check_folder("--dump", o.dump);
  check_folder("--tensorboard", o.tensorboard);
  check_folder("--checkpoints", o.checkpoints);
  check_folder("--save-hf", o.save_hf);
  check_timeline(o.timeline);
  if (o.replay > 0 && o.hashes.empty()) throw UsageError("--replay: nothing says where to", "--hashes FILE");
  if (o.replay > o.steps) {
    throw UsageError(c10::str("--replay ", o.replay, ": more than --steps ", o.steps), "a step of the run");
  }
  if (o.record.empty() != o.history.empty()) {
    throw UsageError(o.record.empty() ? "--history: nothing says what to record" : "--record: nothing says where to",
                     "--record RULES.toml --history FILE");
  }
  if (!o.record.empty()) RecordRules::load(o.record);
}

void check_rates(const TrainOptions& o) {
  constexpr double kMost = 1e30;  // torch multiplies both, also by other numbers, in float32
  for (const auto& [option, value] :
       {std::pair("--lr", o.lr), std::pair("--weight-decay", o.weight_decay.value_or(0))}) {
    if (value > kMost) throw UsageError(c10::str(option, " ", value, ": float32 has no room for it"), "at most 1e30");
  }
  if (o.warmup > o.steps) {
    throw UsageError(c10::str("--warmup ", o.warmup, ": more than --steps ", o.steps), "--warmup of at most --steps");
  }
  if (o.rate == "wsd" && o.warmup + o.decay_steps > o.steps) {
    throw UsageError(c10::str("--decay-steps ", o.decay_steps, ": with --warmup more than --steps"),
                     "fewer --decay-steps");
  }
}

void check_going_on(const TrainOptions& o) {
  // Nobody else holds the state of one process.
  const bool alone = o.max_restarts > 0 && o.processes() == 1;
  if (o.checkpoints.empty() && (o.checkpoint_every > 0 || alone)) {
    throw UsageError(alone ? "--max-restarts: there are no checkpoints to start again from"
                           : "--checkpoint-every: nothing says where to",
                     "--checkpoints FOLDER");
  }
  if (o.max_restarts == 0 && (o.spares > 0 || o.recut || o.copies_to_neighbor > 0)) {
    const char* option = o.recut ? "--recut" : o.spares > 0 ? "--spares" : "--copies-to-neighbor";
    throw UsageError(std::string(option) + ": no lost process is made up for", "--max-restarts N");
  }
}

ExportedProgram open_program(const TrainOptions& o, const TrainParts& parts) {
  if (parts.module) {
    ExportedProgram program = parts.record;
    program.module = parts.module;
    return program;
  }
  if (o.file.empty()) throw UsageError("FILE is missing", "a .pt2 file of torch.export.save or plumb");
  refuse_folder(o.file);
  std::error_code failed;
  if (!o.file.ends_with(".pt2") && std::filesystem::is_regular_file(o.file, failed)) {
    throw UsageError("FILE " + o.file + ": is no .pt2 file", "a .pt2 file of torch.export.save or plumb");
  }
  return load_pt2(o.file);
}

void name_parameters(const TrainOptions& o, TrainJob& job) {
  job.trained = trained_parameters(job.module(), *job.pipe);
  std::vector<std::string> names;
  for (const ModelParameter& p : job.trained) names.push_back(p.name);
  job.by_group = names_by_group(o, names);
  std::map<const c10::TensorImpl*, std::string> first;
  for (const Attr& attr : job.module().state()) {
    job.first_names[attr.name] = first.emplace(attr.tensor.unsafeGetTensorImpl(), attr.name).first->second;
    job.tagged = job.tagged || parameter_data(attr.tensor).has_value();
  }
}

// Returns the path of a rank's own history, of `count` ranks.
std::string file_of_rank(const std::string& path, int64_t count, int rank, std::optional<int64_t> after) {
  const auto of_rank = [&](int64_t r) { return c10::str(path, ".rank", r); };
  if (!after) return count > 1 ? of_rank(rank) : path;
  const bool whole = std::filesystem::exists(path), parted = std::filesystem::exists(of_rank(0));
  if (whole && count == 1) return path;  // files of ranks beside it are another run's
  if (rank == 0) {
    if (whole && !parted) std::filesystem::rename(path, of_rank(0));
    for (int64_t r = count; std::filesystem::exists(of_rank(r)); ++r) HistoryWriter(of_rank(r), true, after);
  }
  return count > 1 || parted ? of_rank(rank) : path;
}

}  // namespace

std::string history_file(const TrainOptions& o, int rank, std::optional<int64_t> after) {
  return file_of_rank(o.history, o.stages, rank, after);
}

std::string hashes_file(const TrainOptions& o, int rank, std::optional<int64_t> after) {
  return file_of_rank(o.hashes, o.processes(), rank, after);
}

void check_wire(const TrainOptions& o) {
  if (o.wire.empty() && !o.wire_exclude.empty())
    throw UsageError("--wire-exclude: every value goes from stage to stage as it is", "--wire e4m3fn,e5m2");
  if (o.stages > 1 || o.wire.empty()) return;
  throw UsageError("--wire: with one stage nothing goes from stage to stage", "--stages 2 or more, or no --wire");
}

namespace {

// Opens the batches of training, and the held-out rows where there are any.
void open_data(const TrainOptions& o, TrainParts& parts, TrainJob& job) {
  const GraphModule& module = job.module();
  job.rows = rows_of_step(o, module);
  if (parts.batches) {
    job.batches = std::move(parts.batches);
  } else {
    auto samples = open_samples(o, {o.data, o.targets, o.mask}, module);
    check_memory(job.rows, samples->bytes_of_row());
    job.batches = std::make_unique<ReadAhead>(
        std::make_unique<EpochBatches>(std::move(samples), job.rows, o.shuffle, static_cast<uint64_t>(o.seed)));
  }
  if (!o.eval_data.empty()) {
    job.eval_samples = open_samples(
        o, {o.eval_data, o.eval_targets, o.eval_data == o.data ? o.mask : "", "--eval-data", "--eval-targets"}, module);
  } else if (o.eval_every > 0 || o.eval_batches > 0 || !o.eval_targets.empty()) {
    throw UsageError("--eval-data is missing", "--eval-data FILE of held-out data");
  }
}

void cut_model(const TrainOptions& o, TrainJob& job) {
  const GraphModule& module = job.module();
  const int stages = job.schedule.num_stages();
  std::string needed_by = "--stages " + std::to_string(o.stages);
  if (stages != o.stages) needed_by += " with --schedule " + o.schedule;
  if (job.plan) needed_by = "--plan " + o.plan;
  WireOptions wire;
  if (o.stages > 1) wire.exclude = o.wire_exclude;
  if (o.stages > 1 && !o.wire.empty()) wire.formats = {o.wire[0], o.wire[1]};
  CutOptions cuts{o.at, o.transmit, wire, job.plan ? job.plan->cut : std::vector<std::string>()};
  job.pipe = prefixed(job.plan ? needed_by + ": " : "", [&] {
    if (job.plan) check_plan_fits(job.plan->operators, module);
    return cut(module, stages, cuts, needed_by);
  });
  if (job.formats) {
    // Rounds the whole model, then cuts it there again: a value that several stages multiply is rounded once, and its
    // gradients are summed as in one process.
    const auto rounded = mark_before(module, cut_values(module, *job.pipe));
    apply_recipe(*rounded, *job.formats);
    cuts.at.clear(), cuts.before.clear();
    job.pipe = cut(*rounded, stages, cuts, needed_by);
  }
  if (!job.plan && o.schedule.ends_with(".csv")) {
    used_by(
        "--schedule " + o.schedule,
        [&] { require_runnable(compute_only(job.schedule), edges_of(connect_stages(job.pipe->table()))); },
        "correct the table, or --schedule 1F1B");
  }
}

// Returns what follows from the options alone: wrong ones are refused before the model is read.
TrainJob job_of_options(const TrainOptions& o) {
  TrainJob job;
  if (o.stages == 1 && !o.at.empty()) {
    throw UsageError("--at: one process has no cuts", "--stages " + std::to_string(o.at.size() + 1));
  }
  if (!o.wire.empty() && o.wire.size() != 2) {
    throw UsageError("--wire: takes two formats, of values and of gradients", "--wire e4m3fn,e5m2");
  }
  // One stage that --recut leaves has no wire. Its checkpoints name it, for the same command to go on from them.
  if (!o.recut) check_wire(o);
  if (!o.plan.empty()) job.plan = o.plan_file->plan;
  job.schedule = job.plan ? job.plan->schedule : read_schedule(o);
  if (!started_by_plumb()) check_outputs(o);  // else the launcher has, before the training began
  check_rates(o);
  device_of(o.device, 0);
  job.pipeline.gradient_groups = static_cast<int>(o.gradient_groups > 0 ? o.gradient_groups : o.replicas);
  used_by("--gradient-groups",
          [&] { check_gradient_groups(job.pipeline.gradient_groups, static_cast<int>(o.replicas), job.schedule); });
  check_going_on(o);
  check_audit(o);
  for (const std::string& text : o.inject) job.faults.push_back(parse_fault(text, o, job.schedule));
  job.pipeline.return_outputs = false;
  job.pipeline.seed = static_cast<uint64_t>(o.seed);
  job.pipeline.record_timeline = !o.timeline.empty();
  return job;
}

}  // namespace

TrainJob prepare_job(const TrainOptions& o, TrainParts parts, const TrainHooks& hooks) {
  TrainJob job = job_of_options(o);
  const std::string name = o.file.empty() ? "the model" : o.file;
  if (hooks.phase) hooks.phase("reading " + name);
  job.program = open_program(o, parts);
  check_folders(o, job);
  if (!o.formats.empty()) {
    used_by("--formats", [&] {
      job.formats = read_recipe(o.formats);
      apply_recipe(*derive(job.module()), *job.formats);  // errors before the data is read
    });
  }
  open_data(o, parts, job);
  job.pipeline.loss = make_loss(o, job.module());
  if (hooks.phase) hooks.phase("cutting " + name);
  cut_model(o, job);
  check_weights_to_save(o, job);
  name_parameters(o, job);
  check_verdict(o, job);
  return job;
}

void take_trained(const TrainJob& job) {
  at::NoGradGuard no_grad;
  const State trained = job.pipe->merge_state_dict();
  std::vector<std::pair<std::string, at::Tensor>> loaded;  // in the place of those that had no values
  for (const Attr& attr : job.module().state()) {
    const Attr* now = trained.find(attr.name);
    if (now == nullptr || now->tensor.is_meta()) continue;
    if (attr.tensor.is_meta()) {
      loaded.emplace_back(attr.name, now->tensor);
    } else if (now->tensor.data_ptr() != attr.tensor.data_ptr()) {
      attr.tensor.detach().copy_(now->tensor);
    }
  }
  if (!loaded.empty()) job.program.module->set_state(loaded);
}

}  // namespace plumb
