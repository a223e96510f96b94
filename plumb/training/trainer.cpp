#include "plumb/training/trainer.h"

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <torch/utils.h>

#include <cmath>
#include <exception>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/launch/spare_ranks.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/recording/recorder.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/training/folder_weights.h"
#include "plumb/training/plan/dry_run.h"
#include "plumb/training/recovery/audit.h"
#include "plumb/training/recovery/lasting.h"
#include "plumb/training/recovery/neighbor_copies.h"
#include "plumb/training/recovery/run_checkpoints.h"
#include "plumb/training/reports/step_hashes.h"
#include "plumb/training/step/evaluate.h"
#include "plumb/training/step/not_finite.h"
#include "plumb/training/step/optimizer.h"
#include "plumb/training/verdict_run.h"

namespace plumb {
namespace {

using Json = nlohmann::json;

// Sets the number of threads, which is the caller's again afterwards: while a Trainer is made, and while it runs.
auto with_threads(const TrainOptions& o) {
  const int before = at::get_num_threads();
  at::set_num_threads(threads_of(o));
  return c10::make_scope_exit([before] { at::set_num_threads(before); });
}

}  // namespace

class Trainer::Run {
 public:
  Run(TrainOptions options, TrainHooks hooks, TrainParts parts, TrainSession* session);
  TrainResult run();

 private:
  void watch_progress();
  void go_on();
  void take_counted(const nlohmann::json& counted);
  void open_file(const std::string& option, const std::function<void()>& open) const;
  void make_recorder();
  void train_step(int64_t step);
  void evaluate(int64_t step);
  void report_no_step();
  void keep_copy(int64_t step);
  void run_steps();
  void finish();

  // Nothing: the run begins.
  std::optional<int64_t> goes_on_after() const {
    if (start_ > 0 || edge_ || generation() > 0 || (session_ && session_->copies.any_found())) return start_;
    if (checkpoints_ && checkpoints_->has_begun()) return 0;
    return std::nullopt;
  }
  bool goes_on_by_itself() const { return edge_ || generation() > 0; }  // nobody has started it again
  int generation() const { return session_ && session_->members ? session_->members->generation() : 0; }
  RankState rank_state() { return {held_tensors(job_, ranks_.rank()), step_->optimizer()}; }

  const TrainOptions o_;
  const TrainHooks hooks_;
  TrainSession* const session_;  // null: the loss of a process ends the run
  const std::shared_ptr<TrainJob> own_job_;
  TrainJob& job_;
  TrainRanks ranks_;
  std::unique_ptr<RunReports> reports_;
  std::unique_ptr<FaultTrigger> faults_;
  std::unique_ptr<TrainStep> step_;
  std::unique_ptr<Evaluator> evaluator_;         // null: no --eval-data
  std::unique_ptr<RunCheckpoints> checkpoints_;  // null: no --checkpoints
  std::unique_ptr<Recorder> recorder_;           // null: no --record
  std::unique_ptr<Auditor> auditor_;             // null: no --audit
  std::unique_ptr<StepHashes> hashes_;           // null: no --hashes
  std::unique_ptr<VerdictRun> verdict_;          // null: no --verdict, or it is done
  std::unique_ptr<NeighborCopies> neighbor_;     // null: no --copies-to-neighbor
  std::vector<std::string> damaged_;             // checkpoints that were passed over
  std::string machines_;                         // which rank computes on another kind of machine, or ""
  int64_t start_ = 0;                            // the step that this run goes on after
  int64_t batch_hash_ = 0;                       // the hash of the batch, which all ranks have
  std::optional<int64_t> edge_;                  // step boundary of the copies in memory that it goes on from
  TrainResult result_;
};

Trainer::Run::Run(TrainOptions options, TrainHooks hooks, TrainParts parts, TrainSession* session)
    : o_(without_outputs(checked(std::move(options)))),
      hooks_(std::move(hooks)),
      session_(session),
      own_job_(session ? session->job : std::make_shared<TrainJob>()),
      job_(*own_job_) {
  const auto threads = with_threads(o_);
  seed_all_generators(static_cast<uint64_t>(o_.seed));
  const auto prepare = [&] { job_ = prepare_job(o_, std::move(parts), hooks_); };
  if (!session && o_.processes() > 1)
    before_meeting(prepare);
  else if (!session)
    prepare();
  ranks_ = meet_ranks(o_, session ? &session->place : nullptr);
  if (generation() == 0) check_equal_options(ranks_.world, o_);
  machines_ = other_machines(ranks_.world);
  if (session) {
    if (!session->members || generation() > 0) edge_ = session->copies.find_edge(ranks_.everyone, job_);
    if (session->was_used && !edge_) job_ = prepare_job(o_, {}, hooks_);  // as the file has it
    session->was_used = true;
  }
  reports_ = std::make_unique<RunReports>(o_, hooks_, job_, ranks_.is_first());
  watch_progress();
  step_ = std::make_unique<TrainStep>(o_, job_, ranks_);
  go_on();
  if (job_.eval_samples)
    evaluator_ = std::make_unique<Evaluator>(o_, job_, *job_.eval_samples, ranks_.world, ranks_.groups);
  // Copies of one parameter are compared with each other, after a newcomer has the state of the others.
  step_->connect();
  if (!o_.verdict.empty()) verdict_ = std::make_unique<VerdictRun>(o_, job_, ranks_.device);
  if (!o_.record.empty() && ranks_.in_first_pipeline())  // replicas have the same weights
    open_file("--history", [this] { make_recorder(); });
  if (o_.audit) {
    auditor_ = std::make_unique<Auditor>(o_, job_, ranks_, *step_, session_ ? &session_->copies : nullptr,
                                         [this](const event::AuditFailed& found) { reports_->emit(found); });
    if (!auditor_->left_out().empty() && ranks_.is_first()) reports_->emit(event::LogProblem{auditor_->left_out()});
  }
  if (!o_.hashes.empty()) {
    open_file("--hashes",
              [this] { hashes_ = std::make_unique<StepHashes>(o_, ranks_.world.rank(), *step_, goes_on_after()); });
  }
}

void Trainer::Run::watch_progress() {
  faults_ = std::make_unique<FaultTrigger>(job_.faults, ranks_.world.rank(),
                                           session_ && session_->members ? &*session_->members : nullptr,
                                           [this](const Fault& fault) {
                                             reports_->emit(event::FaultInjected{fault.text});
                                             flip_bits(fault, *step_);
                                           });
  job_.pipeline.progress = {};
  job_.pipeline.gradient_changed = {};
  if (o_.audit) job_.pipeline.gradient_changed = [this](const std::string& p) { auditor_->gradient_changed(p); };
  const bool reported = ranks_.is_first() && hooks_.progress;
  if (faults_->empty() && !reported && !o_.audit) return;
  job_.pipeline.progress = [this, reported](size_t done, size_t total) {
    if (reported) hooks_.progress(faults_->step(), done, total);
    faults_->action_done(done);
    if (auditor_) auditor_->action_done(done);
  };
}

// From the others' copies, or from the newest checkpoint, if there are any.
void Trainer::Run::go_on() {
  if (!o_.checkpoints.empty())
    checkpoints_ = std::make_unique<RunCheckpoints>(o_, job_, ranks_.world, ranks_.groups, step_->optimizer());
  int64_t newer = 0;  // a checkpoint than what a neighbor has
  if (edge_) {
    const RankState state = rank_state();
    const Json counted = session_->copies.restore(ranks_.everyone, job_, ranks_.world.size(), &state);
    if (checkpoints_ && o_.copies_to_neighbor > 0) newer = checkpoints_->resume(damaged_, *edge_);
    if (newer == 0) take_counted(counted);
    start_ = newer > 0 ? newer : *edge_;
    if (newer > 0) edge_.reset();
  } else if (checkpoints_) {
    start_ = checkpoints_->resume(damaged_);
  }
  if (!session_) return;
  if (o_.copies_to_neighbor > 0) {
    int64_t bytes = 1 << 20;  // and at most 8 numbers of state for each of the model's
    for (const Attr& attr : job_.module().state()) bytes += 8 * std::max<int64_t>(attr.tensor.nbytes(), 64) + 1024;
    neighbor_ = std::make_unique<NeighborCopies>(ranks_.world, session_->place.host, ranks_.groups.pipeline, bytes);
    if (!neighbor_->has_neighbor() && ranks_.is_first())
      reports_->emit(event::LogProblem{"there is no other host to which the state could be sent"});
  }
  session_->copies.connect(ranks_.world, neighbor_ ? neighbor_->memory() : std::vector<SharedMemory>());
}

void Trainer::Run::take_counted(const Json& counted) {
  job_.batches->load_state(counted.value("data", Json()));
  if (checkpoints_) checkpoints_->take_run(counted.value("run", int64_t{0}));
  job_.pipeline.gradient_groups = counted.value("gradient_groups", job_.pipeline.gradient_groups);
}

// A loss of a rank does not make an error of a full disk, say, that the training has survived.
void Trainer::Run::open_file(const std::string& option, const std::function<void()>& open) const {
  goes_on_by_itself() ? static_cast<void>(reports_->attempt(option, open)) : open();
}

void Trainer::Run::make_recorder() {
  const int rank = ranks_.rank();
  const auto after = goes_on_after();
  recorder_ = std::make_unique<Recorder>(
      RecordRules::load(o_.record), history_file(o_, rank, after),
      RecorderOptions{.append = after.has_value(), .after = after, .part = o_.stages > 1, .ranks = o_.stages});
  for (const auto& [index, stage] : step_->stages()) {
    recorder_->attach(*std::static_pointer_cast<GraphStage>(stage)->module(), o_.stages > 1 ? index : -1);
  }
}

void Trainer::Run::train_step(int64_t step) {
  faults_->begin_step(step);
  const Parts parts = [&] {
    const Batch batch = job_.batches->next();
    if (ranks_.world.size() > 1) batch_hash_ = hash_of_batch(batch);
    // Others of the first step may be of other sizes; those of later ones are seen at its end, without another message.
    if (step == start_ + 1) check_equal_batches(ranks_.world, batch_hash_, step);
    return cut_batch(o_, batch, parts_of_step(o_));
  }();
  if (verdict_) {
    if (const auto report = verdict_->step(step - start_, step == o_.steps, parts)) {
      reports_->concluded(step, *report);
      verdict_.reset();
    } else if (step == o_.steps) {
      reports_->emit(event::LogProblem{"there is no verdict, for " + verdict_->problem()});
    }
  }
  if (hashes_) hashes_->begin_step(step);
  const double share = rate_share(o_, step);
  step_->optimizer().set_rate(share);
  if (auditor_) auditor_->begin_step(step);
  const TrainStep::Numbers numbers = step_->compute(step, parts, [this] {
    if (auditor_) auditor_->check();
  });
  result_.loss = numbers.loss;
  if (!std::isfinite(numbers.loss) || !std::isfinite(numbers.norm)) {
    reports_->step(step, numbers, parts, o_.lr * share);
    stop_at_not_finite(o_, job_, ranks_, step, numbers, parts, *reports_);
  }
  if (hashes_) hashes_->gradients();
  step_->update(numbers);
  if (auditor_) auditor_->wrote();
  if (hashes_ && !reports_->attempt("--hashes", [&] { hashes_->end_step(held_tensors(job_, ranks_.rank())); }))
    hashes_.reset();
  if (step == start_ + 1 && o_.recompute != "none" && ranks_.in_first_pipeline()) {
    for (const auto& [index, stage] : step_->stages())
      reports_->emit(event::Recomputed{index, step_->pipeline().recomputed(index).text()});
  }
  const auto record = [&] {
    recorder_->step(step_->has_loss() ? Recorder::Scalars{{"loss", numbers.loss}} : Recorder::Scalars{});
  };
  if (recorder_ && !reports_->attempt("--history", record)) recorder_.reset();
  reports_->step(step, numbers, parts, o_.lr * share);
}

void Trainer::Run::evaluate(int64_t step) {
  const Evaluation found = evaluator_->run();
  result_.eval_loss = found.loss;
  reports_->evaluated(step, found.loss, found.targets);
}

// Does what is left to do where all steps were done before, and names the files that only a step writes.
void Trainer::Run::report_no_step() {
  if (evaluator_) evaluate(start_);
  std::string left;
  for (const auto& [option, path] :
       std::vector<std::pair<std::string, std::string>>{{"--page", o_.page},
                                                        {"--timeline", o_.timeline},
                                                        {"--verdict", join(o_.verdict, {}, ",")},
                                                        {"--verdict-page", o_.verdict_page},
                                                        {"--verdict-recipe", o_.verdict_recipe}}) {
    if (!path.empty()) left += (left.empty() ? "" : ", ") + option + " " + path;
  }
  if (!left.empty() && ranks_.is_first())
    reports_->emit(event::LogProblem{"nothing is made for " + left + ": all steps were done before"});
}

void Trainer::Run::keep_copy(int64_t step) {
  if (!session_) return;
  session_->copies.take(step, rank_state(),
                        {{"data", job_.batches->state()},
                         {"gradient_groups", job_.pipeline.gradient_groups},
                         {"run", checkpoints_ ? checkpoints_->run() : 0}},
                        neighbor_ && neighbor_->has_neighbor() && !neighbor_->complete());
  if (!neighbor_ || step == o_.steps || (step % o_.copies_to_neighbor != 0 && step != start_)) return;
  if (const auto told = neighbor_->send(step, session_->copies.last()); told && ranks_.is_first())
    reports_->emit(*told);
}

void Trainer::Run::run_steps() {
  const auto report_checkpoints = [&] {
    if (checkpoints_ && ranks_.is_first()) reports_->checkpoints(checkpoints_->take_reports());
  };
  result_.steps = start_;
  int64_t stopped_by = 0;
  keep_copy(start_);
  if (checkpoints_ && edge_ && start_ > 0) checkpoints_->make_up(start_, start_ == o_.steps);
  const int64_t end = o_.replay > 0 ? o_.replay : o_.steps;
  for (int64_t step = start_ + 1; step <= end && stopped_by == 0; ++step) {
    train_step(step);
    const int64_t stop = hooks_.stop_signal ? hooks_.stop_signal() : 0;
    const std::vector<int64_t> largest = largest_of_all(ranks_.world, {stop, batch_hash_, -batch_hash_});
    if (largest[1] != -largest[2]) check_equal_batches(ranks_.world, batch_hash_, step);
    stopped_by = largest[0];
    result_.steps = step;
    const bool last = step == end || stopped_by != 0;
    if (evaluator_ && (step == end || (o_.eval_every > 0 && step % o_.eval_every == 0))) evaluate(step);
    reports_->log(last);
    if (checkpoints_) checkpoints_->save(step, last);
    report_checkpoints();
    if (stopped_by != 0 && ranks_.is_first())
      reports_->emit(event::Interrupted{step, o_.steps, static_cast<int>(stopped_by)});
    if (!o_.timeline.empty() && (stopped_by != 0 || step > o_.steps - o_.timeline_steps))
      reports_->keep_timeline(step, step_->pipeline().gather_timeline());
    keep_copy(step);
  }
  if (start_ >= end) report_no_step();
  result_.stopped_by = static_cast<int>(stopped_by);
  if (checkpoints_) checkpoints_->wait();
  report_checkpoints();
  if (ranks_.in_first_pipeline()) finish();
  // A rank that has finished could not help one that is lost now.
  if (session_) largest_of_all(ranks_.world, 0);
  if (ranks_.is_first() && stopped_by == 0)
    release_spares(ranks_.everyone, ranks_.everyone.size() - ranks_.world.size());
  const bool kept_elsewhere = !o_.save.empty() || !o_.save_hf.empty() || o_.file.empty();
  if (checkpoints_ && !kept_elsewhere && o_.replay == 0) checkpoints_->require_last();
}

// Writes what the options ask for, weights before pictures.
void Trainer::Run::finish() {
  const ProcessGroup& pipeline = ranks_.groups.pipeline;
  const bool first = pipeline.rank() == 0;
  std::exception_ptr unsaved;  // the error of --save-hf, which must not cost --save or the caller's model
  const bool goes_on =
      checkpoints_ && result_.stopped_by != 0 && largest_of_all(pipeline, !checkpoints_->has_last()) == 0;
  if (!o_.save_hf.empty() && goes_on) {  // the folder has to be new when the same command runs again
    if (first) reports_->emit(event::LogProblem{"--save-hf " + o_.save_hf + " is written at the end of the training"});
  } else if (!o_.save_hf.empty()) {
    try {
      save_folder_weights(o_, job_, pipeline);
      if (first) reports_->emit(event::Saved{o_.save_hf});
    } catch (const std::exception&) {
      unsaved = std::current_exception();
    }
  }
  if (!o_.save.empty() || o_.file.empty()) {
    make_room_for_weights(job_);
    gather_state(*job_.pipe, job_.schedule, pipeline);
    const bool saves = !o_.save.empty() && first;
    if (saves || o_.file.empty()) take_trained(job_);
    if (saves) {
      save_pt2(job_.program, o_.save);
      reports_->emit(event::Saved{o_.save});
    }
  }
  if (unsaved) {
    largest_of_all(pipeline, 0);  // a rank that ends with an error would end rank 0 while it writes
    std::rethrow_exception(unsaved);
  }
  if (first) reports_->draw_timeline();
}

TrainResult Trainer::Run::run() {
  const auto threads = with_threads(o_);
  if (o_.dry_run) {
    if (ranks_.is_first()) reports_->emit(measure_needs(o_, job_));
    return result_;
  }
  if (ranks_.is_first() && edge_) reports_->emit(event::Resumed{start_, std::nullopt, "copies in memory"});
  if (ranks_.is_first() && !edge_) {
    reports_->started();
    if (!machines_.empty()) reports_->emit(event::LogProblem{machines_});
    if (!session_ && o_.max_restarts > 0) {
      const auto place = discover_ranks();
      reports_->emit(event::LogProblem{"--max-restarts: makes up for no lost rank, for " +
                                       (place ? place->launcher + " starts the processes" : "this process is alone")});
    }
    for (const std::string& problem : damaged_) reports_->emit(event::CheckpointProblem{problem});
    if (session_ && !session_->copies.missing().empty())
      reports_->emit(event::LogProblem{"no process that is left has the state of " + session_->copies.missing()});
    // Without a checkpoint a run that lost more than its copies make up for begins anew.
    if (const auto after = goes_on_after())
      reports_->emit(event::Resumed{*after, o_.steps, *after > 0 ? o_.checkpoints : "the first weights"});
  }
  reports_->begin(goes_on_after(), goes_on_by_itself());
  try {
    if (checkpoints_) checkpoints_->begin();
    run_steps();
  } catch (...) {
    if (checkpoints_) checkpoints_->abandon();
    throw;
  }
  return result_;
}

Trainer::Trainer(TrainOptions options, TrainHooks hooks, TrainParts parts)
    : run_(std::make_unique<Run>(std::move(options), std::move(hooks), std::move(parts), nullptr)) {}
Trainer::Trainer(TrainOptions options, TrainHooks hooks, TrainSession& session)
    : run_(std::make_unique<Run>(std::move(options), std::move(hooks), TrainParts(), &session)) {}
Trainer::~Trainer() = default;
TrainResult Trainer::run() {
  const std::unique_ptr<Run> once = std::move(run_);
  if (!once) throw Error(ErrorKind::InvalidState, "this training has run", "", "make another Trainer");
  return once->run();
}

TrainResult train(const TrainOptions& options, const TrainHooks& hooks) { return Trainer(options, hooks).run(); }

void check_training(const TrainOptions& options, const TrainHooks& hooks) {
  TrainJob job = prepare_job(without_outputs(checked(options)), {}, hooks);
  job.batches->next();
}

}  // namespace plumb
