#include "plumb/training/trainer.h"

#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

#include "plumb/core/output_file.h"
#include "plumb/core/table.h"
#include "plumb/pipeline/broadcast.h"
#include "plumb/pipeline/environment.h"
#include "plumb/pipeline/graph_stage.h"
#include "plumb/recording/recorder.h"
#include "plumb/training/dry_run.h"
#include "plumb/training/evaluate.h"
#include "plumb/training/folder_weights.h"
#include "plumb/training/lasting.h"
#include "plumb/training/loss.h"
#include "plumb/training/not_finite.h"
#include "plumb/training/optimizer.h"
#include "plumb/training/rates.h"
#include "plumb/training/run_checkpoints.h"
#include "plumb/training/run_log.h"
#include "plumb/training/stages.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

// The number of threads is the caller's again afterwards.
class ProcessSettings {
 public:
  explicit ProcessSettings(const TrainOptions& o) : threads_(at::get_num_threads()) {
    at::set_num_threads(threads_of(o));
  }
  ~ProcessSettings() { at::set_num_threads(threads_); }
  ProcessSettings(const ProcessSettings&) = delete;

 private:
  const int threads_;
};

}  // namespace

struct Trainer::State {
  State(TrainOptions options, TrainHooks hooks, TrainParts parts, TrainSession* session);
  TrainResult run();

  // --- before the first step ---
  void meet();
  void watch_progress();
  void make_stages_and_optimizer();
  void go_on();
  void make_recorder(int rank);

  // --- a step ---
  struct Numbers {
    double loss = 0, norm = 0;
    double memory = 0;            // of this pipeline's largest rank
    std::vector<double> squares;  // of the gradients' norms, by job.trained
  };
  // Leaves the step's gradients in the parameters.
  Numbers compute(int64_t step, const Parts& parts);
  [[noreturn]] void fail_at(int64_t step, const Numbers& numbers, const Parts& parts);
  void tell_step(int64_t step, const Numbers& numbers, const Parts& parts, double share);
  void tell_checkpoints();
  void fail_on_purpose(size_t done);
  void keep_copy(int64_t step);
  void evaluate(int64_t step, bool last);
  void train_step(int64_t step);
  void run_steps();
  void finish(int64_t stopped_by);

  void emit(const TrainEvent& event) const {
    if (hooks.event) hooks.event(event);
  }
  bool is_first() const { return world.rank() == 0; }
  // None: the run begins.
  std::optional<int64_t> goes_on_after() const {
    if (start > 0 || (session && session->members.generation() > 0)) return start;
    if (checkpoints && checkpoints->has_begun()) return 0;
    return std::nullopt;
  }
  RankState rank_state() const { return {held_tensors(job, groups.pipeline.rank()), *optimizer}; }
  bool in_first_pipeline() const { return groups.replicas.rank() == 0; }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  const TrainOptions o;
  const TrainHooks hooks;
  const ProcessSettings settings;
  TrainSession* const session;  // null: the loss of a process ends the run
  const std::shared_ptr<TrainJob> own_job;
  TrainJob& job;
  std::vector<Fault> faults;  // of this rank
  ProcessGroup world;
  ReplicatedGroups groups;
  at::Device device = at::kCPU;  // where this rank's stages compute
  std::map<int, std::shared_ptr<StageFunction>> stages;
  NamedTensors parameters;           // that this rank trains, each tensor once, by their first names in the model
  std::vector<at::Tensor> measured;  // of job.trained: the tensor, on the rank that owns it
  std::vector<int> owners;           // of job.trained, then each rank, then that of the loss
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Pipeline> pipeline;
  std::unique_ptr<PassSum> passes;  // null: one pass a step
  std::unique_ptr<Evaluator> evaluator;
  std::unique_ptr<RunCheckpoints> checkpoints;
  std::vector<std::string> damaged;  // checkpoints that were passed over
  int64_t start = 0;                 // the step that this run goes on after
  std::optional<int64_t> edge;       // of the copies that it goes on from
  std::unique_ptr<Recorder> recorder;
  std::unique_ptr<RunLog> log;  // on rank 0
  std::vector<std::vector<TimelineEvent>> timelines;
  int64_t last_timeline = 0;
  Clock::time_point begin;
  int64_t current = 1;     // the step that runs
  size_t done_before = 0;  // actions of the step, for an injected fault
  StepNumbers told;        // of the last step, on rank 0
  TrainResult result;
};

Trainer::State::State(TrainOptions options, TrainHooks hooks_, TrainParts parts, TrainSession* session_)
    : o(std::move(options)),
      hooks(std::move(hooks_)),
      settings(o),
      session(session_),
      own_job(session ? session->job : std::make_shared<TrainJob>()),
      job(*own_job) {
  torch::manual_seed(static_cast<uint64_t>(o.seed));
  if (!session) job = prepare_job(o, std::move(parts), hooks);
  meet();
  watch_progress();
  make_stages_and_optimizer();
  go_on();
  // Copies of one parameter are held against each other: after a newcomer has the state of the others.
  if (job.eval_samples) evaluator = std::make_unique<Evaluator>(o, job, *job.eval_samples, world, groups);
  PipelineOptions of_run = job.pipeline;
  of_run.replicas = groups.replicas;
  pipeline = std::make_unique<Pipeline>(make_layout(job.pipe->table()), job.schedule, stages, groups.pipeline, of_run);
  if (!o.record.empty() && in_first_pipeline())
    make_recorder(groups.pipeline.rank());  // replicas have the same weights
}

void Trainer::State::meet() {
  const auto place = session ? std::optional(session->place) : o.processes() > 1 ? discover_ranks() : std::nullopt;
  device = device_of(o, place ? place->local_rank : 0);
  GlooOptions of_group;
  if (!device.is_cpu()) of_group.device = device;
  if (session) {
    world = make_gloo_group(session->place, of_group);
  } else if (o.processes() > 1) {
    world = make_group_from_environment(of_group);
  }
  world.set_timeout(std::chrono::seconds(o.patience));
  if (world.size() != o.processes()) {
    throw UsageError(c10::str("--stages ", o.stages, " --data-parallel ", o.replicas, ": the launcher started ",
                              world.size(), " processes"),
                     "--stages times --data-parallel of " + std::to_string(world.size()));
  }
  groups = divide_into_replicas(world, static_cast<int>(o.replicas));
  if (!session) return;
  if (session->members.generation() > 0) edge = session->copies.find_edge(world, job);
  if (session->was_used && !edge) job = prepare_job(o, {}, hooks);  // as the file has it
  session->was_used = true;
}

void Trainer::State::watch_progress() {
  faults = faults_of(job.faults, world.rank());
  job.pipeline.progress = {};
  if (faults.empty() && !(is_first() && hooks.progress)) return;
  job.pipeline.progress = [this](size_t done, size_t total) {
    if (is_first() && hooks.progress) hooks.progress(current, done, total);
    fail_on_purpose(done);
    done_before = done;
  };
}

void Trainer::State::make_stages_and_optimizer() {
  const int rank = groups.pipeline.rank();
  load_folder_weights(o, job, rank);
  if (!device.is_cpu()) {
    for (const int stage : job.schedule.placement.stages_of(rank)) job.pipe->move_stage(stage, device);
  }
  stages = make_stages(o, job, rank);
  std::set<const c10::TensorImpl*> seen;
  for (const auto& [index, stage] : stages) {
    for (const NamedTensor& p : stage->parameters()) {
      if (!p.tensor.requires_grad() || !seen.insert(p.tensor.unsafeGetTensorImpl()).second) continue;
      parameters.emplace_back(job.first_name(p.name), p.tensor);
    }
  }
  for (const ModelParameter& p : job.trained) {
    owners.push_back(job.schedule.placement.rank_of(p.stage, 0));
    measured.push_back(owners.back() == rank ? job.pipe->stage(p.stage)->state().get(p.held_as).tensor : at::Tensor());
  }
  // None goes on before all have come (state_copies.h).
  for (int r = 0; r < groups.pipeline.size(); ++r) owners.push_back(r);
  owners.push_back(job.schedule.placement.rank_of(job.schedule.num_stages() - 1, 0));
  optimizer = std::make_unique<Optimizer>(o, job.tagged, parameters);
  if (o.accumulate > 1) passes = std::make_unique<PassSum>(parameters);
}

// From the others' copies, or from the newest checkpoint, if there are any.
void Trainer::State::go_on() {
  if (!o.checkpoints.empty()) checkpoints = std::make_unique<RunCheckpoints>(o, job, world, groups, *optimizer);
  if (edge) {
    const Json counted = session->copies.restore(world, job, rank_state());
    job.batches->load_state(counted.value("data", Json()));
    if (checkpoints) checkpoints->take_run(counted.value("run", int64_t{0}));
    job.pipeline.gradient_groups = counted.value("gradient_groups", job.pipeline.gradient_groups);
    start = *edge;
  } else if (checkpoints) {
    start = checkpoints->resume(damaged);
  }
  if (session) session->copies.connect(world);
}

void Trainer::State::make_recorder(int rank) {
  const auto after = goes_on_after();
  recorder = std::make_unique<Recorder>(
      RecordRules::load(o.record), after ? history_to_go_on_with(o, rank, *after) : history_file(o, rank),
      RecorderOptions{.append = after.has_value(), .after = after, .part = o.stages > 1});
  for (const auto& [index, stage] : stages) {
    recorder->attach(*std::static_pointer_cast<GraphStage>(stage)->module(), o.stages > 1 ? index : -1);
  }
}

Trainer::State::Numbers Trainer::State::compute(int64_t step, const Parts& parts) {
  const double whole = static_cast<double>(parts.total());
  if (whole == 0) {
    throw Error(ErrorKind::InvalidArgument, c10::str("step ", step, ": no target of the batch counts"), "",
                "a larger --batch, or data with fewer masked or ignored targets");
  }
  for (const auto& [name, tensor] : parameters) tensor.mutable_grad().reset();
  Numbers numbers;
  const auto of_pipeline = static_cast<size_t>(o.microbatches), of_pass = of_pipeline * static_cast<size_t>(o.replicas);
  for (int64_t pass = 0; pass < o.accumulate; ++pass) {
    const size_t first = static_cast<size_t>(pass) * of_pass;
    const size_t mine = first + static_cast<size_t>(groups.replicas.rank()) * of_pipeline;
    const auto part = [&](const auto& all, size_t from, size_t count) {
      return std::vector(all.begin() + static_cast<int64_t>(from), all.begin() + static_cast<int64_t>(from + count));
    };
    double counting = 0;
    for (const int64_t count : part(parts.counts, first, of_pass)) counting += static_cast<double>(count);
    if (counting == 0) continue;  // no target of the pass counts
    pipeline->set_step(step - 1, part(parts.first_rows, mine, of_pipeline + 1));
    pipeline->step_microbatches(part(parts.inputs, mine, of_pipeline), part(parts.targets, mine, of_pipeline),
                                part(parts.counts, mine, of_pipeline), static_cast<int64_t>(counting));
    const double weight = counting * static_cast<double>(o.accumulate) / whole;
    if (passes) passes->take(weight);
    const at::Tensor loss = pipeline->gather_loss();
    if (loss.defined()) numbers.loss += loss.item<double>() * (weight / static_cast<double>(o.accumulate));
  }
  if (passes) passes->give(o.accumulate);
  std::vector<double> shared;
  for (const at::Tensor& p : measured) {
    shared.push_back(p.defined() && p.grad().defined() ? sum_of_squares(p.grad()) : 0);
  }
  shared.resize(owners.size() - 1, memory_of_process(device));
  shared.push_back(numbers.loss);
  share_numbers(groups.pipeline, owners, shared);
  numbers.loss = shared.back();
  numbers.memory = *std::max_element(shared.begin() + static_cast<int64_t>(measured.size()), shared.end() - 1);
  shared.resize(measured.size());
  numbers.norm = std::sqrt(std::accumulate(shared.begin(), shared.end(), 0.0));
  numbers.squares = std::move(shared);
  return numbers;
}

void Trainer::State::fail_at(int64_t step, const Numbers& numbers, const Parts& parts) {
  std::string what = c10::str("the loss of step ", step, " is ", short_number(numbers.loss));
  const auto bad = std::ranges::find_if_not(numbers.squares, [](double s) { return std::isfinite(s); });
  if (std::isfinite(numbers.loss) && bad != numbers.squares.end()) {
    what = c10::str("the gradient of ", job.trained[bad - numbers.squares.begin()].name, " in step ", step,
                    " is not finite");
  }
  gather_state(*job.pipe, job.schedule, groups.pipeline);
  std::string where, remedy = "a smaller --lr, or plumb track to see where numbers grow";
  if (is_first()) {
    take_trained(job);
    const NotFinite found = find_not_finite(o, job, parts);
    where = found.where;
    if (!o.dump.empty()) {
      try {
        dump_step(o, job, parts, step, found, what);
        emit(event::Dumped{o.dump, where});
        remedy += "; the step is in " + o.dump;
      } catch (const Error& e) {
        remedy += "; the step could not be kept: " + std::string(e.message());
      }
    } else {
      remedy += "; --dump FOLDER keeps the step";
    }
  }
  of_rank_0(world, 0);  // the others end after rank 0 has looked
  throw Error(ErrorKind::Numerics,
              what + ": training ended, its weights are not saved" + (where.empty() ? "" : "; first was " + where), "",
              remedy);
}

void Trainer::State::tell_step(int64_t step, const Numbers& numbers, const Parts& parts, double share) {
  if (!is_first()) return;
  const double now = seconds();
  const std::optional<int64_t> tokens = parts.tokens() > 0 ? std::optional(parts.tokens()) : std::nullopt;
  emit(event::Stepped{step, o.steps, numbers.loss, o.lr * share, numbers.norm, job.rows, tokens, numbers.memory, now});
  const double each = now - told.seconds;
  told = {.step = step,
          .loss = numbers.loss,
          .lr = o.lr * share,
          .norm = numbers.norm,
          .rows_per_second = static_cast<double>(job.rows) / each,
          .tokens_per_second = static_cast<double>(parts.tokens()) / each,
          .memory = numbers.memory,
          .seconds = now};
}

void Trainer::State::evaluate(int64_t step, bool last) {
  const bool now = evaluator && (last || (o.eval_every > 0 && step % o.eval_every == 0));
  if (now) {
    const Evaluation found = evaluator->run();
    result.eval_loss = found.loss;
    if (is_first()) emit(event::Evaluated{step, found.loss, found.targets});
  }
  if (now) told.eval_loss = result.eval_loss;
  const std::string problem = log ? log->add(told, last) : "";
  if (!problem.empty()) emit(event::LogProblem{problem});
}

void Trainer::State::finish(int64_t stopped_by) {
  result.stopped_by = static_cast<int>(stopped_by);
  if (!in_first_pipeline()) return;
  const bool first = groups.pipeline.rank() == 0;
  // Weights before pictures.
  if (!o.save_hf.empty()) {
    save_folder_weights(o, job, groups.pipeline);
    if (first) emit(event::Saved{o.save_hf});
  }
  if (!o.save.empty() || o.file.empty()) {
    make_room_for_weights(job);
    gather_state(*job.pipe, job.schedule, groups.pipeline);
    if (!o.save.empty() && first) {
      save_trained(o, job);
      emit(event::Saved{o.save});
    } else if (o.file.empty()) {
      take_trained(job);
    }
  }
  if (!o.timeline.empty() && first && !timelines.empty()) {
    const MeasuredStep drawn = draw_timeline(o.timeline, job.schedule, timelines, static_cast<int>(last_timeline));
    emit(event::Drew{o.timeline, drawn.bubble, drawn.conclusion});
  }
}

void Trainer::State::tell_checkpoints() {
  if (!checkpoints || !is_first()) return;
  for (const CheckpointReport& report : checkpoints->take_reports()) {
    if (!report.problem.empty()) emit(event::CheckpointProblem{report.problem});
    if (report.folder.empty()) continue;
    emit(event::CheckpointWritten{report.step, report.folder, report.copied + report.waited, report.written});
  }
}

// `done`: actions of the step.
void Trainer::State::fail_on_purpose(size_t done) {
  for (const Fault& fault : faults) {
    if (fault.step != current || fault.action > done || (done > 0 && fault.action <= done_before)) continue;
    if (session && !session->members.is_first_to(fault.text)) continue;
    emit(event::FaultInjected{fault.text});
    fault.happen();
  }
}

void Trainer::State::keep_copy(int64_t step) {
  if (!session) return;
  session->copies.take(step, rank_state(),
                       {{"data", job.batches->state()},
                        {"gradient_groups", job.pipeline.gradient_groups},
                        {"run", checkpoints ? checkpoints->run() : 0}});
}

void Trainer::State::train_step(int64_t step) {
  current = step;
  done_before = 0;
  fail_on_purpose(0);
  const Parts parts = cut_batch(o, job.batches->next(), parts_of_step(o));
  const double share = rate_share(o, step);
  optimizer->set_rate(share);
  const Numbers numbers = compute(step, parts);
  result.loss = numbers.loss;
  if (!std::isfinite(numbers.loss) || !std::isfinite(numbers.norm)) {
    tell_step(step, numbers, parts, share);
    fail_at(step, numbers, parts);
  }
  clip_gradients(parameters, numbers.norm, o.clip);
  optimizer->step();
  if (step == start + 1 && o.recompute != "none" && in_first_pipeline()) {
    for (const auto& [index, stage] : stages) emit(event::Recomputed{index, pipeline->recomputed(index).text()});
  }
  if (recorder) {
    const bool has_loss = owners.back() == groups.pipeline.rank();
    recorder->step(has_loss ? Recorder::Scalars{{"loss", numbers.loss}} : Recorder::Scalars{});
  }
  tell_step(step, numbers, parts, share);
}

void Trainer::State::run_steps() {
  result.steps = start;
  int64_t stopped_by = 0;
  keep_copy(start);
  // The one that was being written may have been given up.
  if (checkpoints && edge && start > 0) checkpoints->save(start, start == o.steps);
  for (int64_t step = start + 1; step <= o.steps && stopped_by == 0; ++step) {
    train_step(step);
    if (hooks.stop_signal) stopped_by = largest_of_all(world, hooks.stop_signal());
    result.steps = step;
    evaluate(step, step == o.steps || stopped_by != 0);
    if (checkpoints) checkpoints->save(step, step == o.steps || stopped_by != 0);
    tell_checkpoints();
    if (stopped_by != 0 && is_first()) emit(event::Interrupted{step, o.steps, static_cast<int>(stopped_by)});
    if (!o.timeline.empty() && (stopped_by != 0 || step > o.steps - o.timeline_steps)) {
      timelines.push_back(pipeline->gather_timeline());
      last_timeline = step;
    }
    keep_copy(step);
  }
  if (checkpoints) checkpoints->wait();
  tell_checkpoints();
  finish(stopped_by);
  // A rank that has finished could not help one that is lost now.
  std::vector<int> each;
  for (int r = 0; r < world.size(); ++r) each.push_back(r);
  std::vector<double> through(each.size());
  if (session) share_numbers(world, each, through);
}

TrainResult Trainer::State::run() {
  if (o.dry_run) {
    if (is_first()) emit(measure_needs(o, job));
    return result;
  }
  if (is_first() && edge) emit(event::Resumed{start, std::nullopt, "copies in memory"});
  if (is_first() && !edge) {
    emit(event::Started{to_toml(o)});
    if (!o.options.empty() && o.options != "-" && !started_by_plumb()) write_file_atomically(o.options, to_toml(o));
    for (size_t g = 0; g < job.by_group.size(); ++g) emit(event::Group{o.groups[g], job.by_group[g]});
    if (job.tagged)
      emit(event::OwnRates{"u-muP's, of each parameter's own, for the file's parameters are tagged"});
    for (const std::string& problem : damaged) emit(event::CheckpointProblem{problem});
    // Without a checkpoint a run that lost more than its copies make up for begins anew.
    if (const auto after = goes_on_after())
      emit(event::Resumed{*after, o.steps, *after > 0 ? o.checkpoints : "the first weights"});
  }
  if (is_first()) log = std::make_unique<RunLog>(o, goes_on_after());
  begin = Clock::now();
  try {
    if (checkpoints) checkpoints->begin();
    run_steps();
  } catch (...) {
    if (checkpoints) checkpoints->abandon();
    throw;
  }
  return result;
}

Trainer::Trainer(TrainOptions options, TrainHooks hooks, TrainParts parts)
    : state_(std::make_unique<State>(std::move(options), std::move(hooks), std::move(parts), nullptr)) {}
Trainer::Trainer(TrainOptions options, TrainHooks hooks, TrainSession& session)
    : state_(std::make_unique<State>(std::move(options), std::move(hooks), TrainParts(), &session)) {}
Trainer::~Trainer() = default;
TrainResult Trainer::run() { return state_->run(); }

TrainResult train(const TrainOptions& options, const TrainHooks& hooks) { return Trainer(options, hooks).run(); }

void check_training(const TrainOptions& options, const TrainHooks& hooks) {
  TrainJob job = prepare_job(options, {}, hooks);
  job.batches->next();
}

}  // namespace plumb
