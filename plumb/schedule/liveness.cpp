#include "plumb/schedule/liveness.h"

#include <algorithm>
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

using Life = PipelineActivationLiveness::Life;
using Lives = std::map<std::pair<int, int>, Life>;

constexpr int kNone = -1;

// Returns the lives of these stages' activations in a row, without slots.
Lives find_lives(const std::vector<Action>& row, int rank, const std::set<int>& stages) {
  Lives lives;
  const auto note = [&](int Life::*end, const Action& action, int position) {
    int& known = lives.try_emplace({action.stage, action.microbatch}, Life{kNone, kNone}).first->second.*end;
    if (known != kNone) throw Error(ErrorKind::Schedule, str(to_string(action), " stands twice on rank ", rank));
    known = position;
  };
  for (int i = 0; i < static_cast<int>(row.size()); ++i) {
    for (const Action& part : {row[i].first_part(), row[i].second_part()}) {
      if (!part.is_compute() || !stages.contains(part.stage) || part.kind == ActionKind::BackwardInput) continue;
      note(part.kind == ActionKind::Forward ? &Life::forward : &Life::release, part, i);
    }
  }
  for (const auto& [at, life] : lives) {
    if (life.forward != kNone && life.forward <= life.release) continue;
    throw Error(ErrorKind::Schedule, str("stage ", at.first, ", microbatch ", at.second, " has no forward on rank ",
                                         rank, " with a backward after it that frees its activations"));
  }
  return lives;
}

}  // namespace

PipelineActivationLiveness analyze_pipeline_activation_liveness(const Schedule& schedule, int rank,
                                                                const std::vector<int>& stages,
                                                                bool whole_microbatches) {
  if (rank < 0 || rank >= schedule.num_ranks()) {
    throw Error(ErrorKind::InvalidArgument, str("there is no rank ", rank, " among ", schedule.num_ranks(), " ranks"));
  }
  const std::set<int> wanted(stages.begin(), stages.end());
  if (wanted.empty() || wanted.size() != stages.size())
    throw Error(ErrorKind::InvalidArgument, "the stages are to be at least one, each given once");
  PipelineActivationLiveness found{find_lives(schedule.rows[rank], rank, wanted)};
  for (const int stage : wanted) {
    if (std::ranges::none_of(found.lives, [stage](const auto& life) { return life.first.first == stage; }))
      throw Error(ErrorKind::Schedule, str("stage ", stage, " is not run on rank ", rank));
  }

  // Each activation for itself, or all of a microbatch from the first forward to the last release among them.
  const auto group_of = [&](std::pair<int, int> at) { return whole_microbatches ? std::pair(-1, at.second) : at; };
  Lives groups;
  for (const auto& [at, life] : found.lives) {
    Life& group = groups.try_emplace(group_of(at), life).first->second;
    group.forward = std::min(group.forward, life.forward);
    group.release = std::max(group.release, life.release);
  }
  std::vector<Life*> order;
  for (auto& [at, group] : groups) order.push_back(&group);
  std::ranges::stable_sort(order, {}, [](const Life* life) { return std::pair(life->forward, life->release); });
  std::vector<int> last_use;  // by slot
  for (Life* life : order) {
    const auto free = std::ranges::find_if(last_use, [&](int last) { return last < life->forward; });
    life->slot = static_cast<int>(free - last_use.begin());
    if (free == last_use.end()) last_use.push_back(0);
    last_use[life->slot] = life->release;
  }
  for (auto& [at, life] : found.lives) life = groups.at(group_of(at));
  found.num_slots = static_cast<int>(last_use.size());
  return found;
}

}  // namespace plumb
