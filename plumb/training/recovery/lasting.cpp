#include "plumb/training/recovery/lasting.h"

#include <unistd.h>

#include "plumb/core/error.h"
#include "plumb/pipeline/launch/spare_ranks.h"
#include "plumb/schedule/compare.h"
#include "plumb/schedule/generators.h"
#include "plumb/training/ranks.h"
#include "plumb/training/reports/step_hashes.h"

namespace plumb {
namespace {

// Returns whether another process in this one's place would fail as well.
bool fails_for_good(const Error& e) {
  switch (e.kind()) {
    case ErrorKind::Communication:
    case ErrorKind::ExecutionFailed:
    case ErrorKind::Internal: return false;
    default: return true;
  }
}

// Returns the quickest of those with one stage a rank and sums in the order of microbatches.
std::string quickest_schedule(int stages, int microbatches) {
  CompareOptions options;
  options.stages_per_rank = {1};
  for (const std::string& name : schedule_names()) {
    const ScheduleTraits& traits = schedule_traits(name);
    if (traits.min_stages_per_rank == 1 && !traits.bidirectional) options.names.push_back(name);
  }
  Costs equal;
  equal.forward = equal.input = equal.weight = equal.activation = {1};
  equal.communication = {0};
  for (const ScheduleChoice& choice : compare_schedules(stages, microbatches, even_costs(equal, stages), options)) {
    if (choice.problem.empty() && choice.fits) return choice.name;
  }
  return "GPipe";
}

}  // namespace

int fewer_processes(const TrainOptions& o, int left) {
  for (int64_t stages = o.stages; stages >= 1; --stages) {
    if (stages * o.replicas <= left) return static_cast<int>(stages * o.replicas);
  }
  // Half of the replicas have twice as many groups of gradients each.
  for (int64_t replicas = o.replicas; replicas % 2 == 0;) {
    replicas /= 2;
    if (replicas <= left) return static_cast<int>(replicas);
  }
  return 0;
}

TrainOptions options_for(const TrainOptions& o, int processes) {
  if (processes == o.processes()) return o;
  TrainOptions now = o;
  const bool all_replicas = processes % o.replicas == 0;
  now.replicas = all_replicas ? o.replicas : processes;
  now.stages = all_replicas ? processes / o.replicas : 1;
  now.microbatches = o.microbatches * o.replicas / now.replicas;
  now.gradient_groups = o.gradient_groups > 0 ? o.gradient_groups : o.replicas;
  now.schedule = quickest_schedule(static_cast<int>(now.stages), static_cast<int>(now.microbatches));
  now.threads = threads_of(o);  // sums are split over them
  now.at.clear();
  now.plan.clear();
  now.inject.clear();
  // Nobody has a copy of one process's state, and nothing else makes up for its loss.
  if (processes == 1 && now.checkpoints.empty()) {
    now.max_restarts = now.spares = now.copies_to_neighbor = 0, now.recut = false;
    now.wire.clear(), now.wire_exclude.clear();
  }
  return now;
}

TrainResult train_lasting(const TrainOptions& given, const TrainHooks& hooks, Membership members) {
  const TrainOptions o = without_outputs(checked(given));
  TrainSession session{.members = std::move(members), .place = {}, .copies = StateCopies(), .job = nullptr};
  TrainOptions now = o;
  session.job = std::make_shared<TrainJob>(prepare_job(now, {}, hooks));
  std::optional<Error> lost;
  while (const auto place = session.members->next()) {
    session.place = *place;
    try {
      if (const TrainOptions fitting = options_for(o, place->world_size); !(fitting == now)) {
        now = fitting;
        session.job = std::make_shared<TrainJob>(prepare_job(now, {}, hooks));
        session.was_used = false;
      }
      return Trainer(now, hooks, session).run();
    } catch (const Error& e) {
      if (fails_for_good(e)) session.members->fail_for_good();
      if (e.kind() != ErrorKind::Communication) throw;
      lost = e;
    }
    session.copies.leave();
    session.members->leave();
  }
  if (lost && !session.members->ended_well()) throw *lost;
  return {};
}

TrainResult train_on_hosts(const TrainOptions& given, const TrainHooks& hooks, const RankEnvironment& place,
                           const std::function<void()>& before_steps) {
  const TrainOptions o = without_outputs(checked(given));
  const int ranks = place.world_size;
  const bool fewer = o.recut && ranks < o.processes() && fewer_processes(o, ranks) > 0;
  const TrainOptions now = fewer ? options_for(o, fewer_processes(o, ranks)) : o;
  if (place.rank == 0 && place.launcher_serves_store && process_variable("GROUP_WORLD_SIZE").value_or("1") != "1")
    hooks.event(event::LogProblem{
        "torchrun's agents do not hear of each other's new addresses when a host is lost or comes (torch 2.13): set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all of them"});
  TrainSession session{
      .members = {}, .place = place, .copies = StateCopies(std::make_shared<Keeper>(::getppid())), .job = nullptr};
  session.job = std::make_shared<TrainJob>(prepare_job(now, {}, hooks));
  if (place.rank < now.processes()) {
    Trainer trainer(now, hooks, session);
    before_steps();
    return trainer.run();
  }
  const TrainRanks met = meet_ranks(now, &place);
  if (session.copies.find_edge(met.everyone, *session.job))
    session.copies.restore(met.everyone, *session.job, now.processes(), nullptr);
  wait_as_spare(met.everyone);
  return {};
}

}  // namespace plumb
