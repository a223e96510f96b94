#include "plumb/schedule/liveness.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "plumb/core/error.h"

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
    if (known != kNone)
      throw Error(ErrorKind::Schedule, to_string(action) + " stands twice on rank " + std::to_string(rank));
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
    throw Error(ErrorKind::Schedule, "stage " + std::to_string(at.first) + ", microbatch " + std::to_string(at.second) +
                                         " has no forward on rank " + std::to_string(rank) +
                                         " with a backward after it that frees its activations");
  }
  return lives;
}

// Makes all stages of a microbatch live from the first forward to the last release among them.
void join_microbatches(Lives& lives) {
  std::map<int, Life> whole;
  for (const auto& [at, life] : lives) {
    Life& joined = whole.try_emplace(at.second, life).first->second;
    joined.forward = std::min(joined.forward, life.forward);
    joined.release = std::max(joined.release, life.release);
  }
  for (auto& [at, life] : lives) life = whole.at(at.second);
}

}  // namespace

PipelineActivationLiveness analyze_pipeline_activation_liveness(const Schedule& schedule, int rank,
                                                                const std::vector<int>& stages,
                                                                bool whole_microbatches) {
  if (rank < 0 || rank >= schedule.num_ranks()) {
    throw Error(ErrorKind::InvalidArgument, "there is no rank " + std::to_string(rank) + " among " +
                                                std::to_string(schedule.num_ranks()) + " ranks");
  }
  const std::set<int> wanted(stages.begin(), stages.end());
  if (wanted.empty() || wanted.size() != stages.size())
    throw Error(ErrorKind::InvalidArgument, "the stages are to be at least one, each given once");
  PipelineActivationLiveness found{find_lives(schedule.rows[rank], rank, wanted)};
  for (const int stage : wanted) {
    if (std::ranges::none_of(found.lives, [stage](const auto& life) { return life.first.first == stage; })) {
      throw Error(ErrorKind::Schedule,
                  "stage " + std::to_string(stage) + " is not run on rank " + std::to_string(rank));
    }
  }
  if (whole_microbatches) join_microbatches(found.lives);

  std::vector<std::tuple<int, int, std::pair<int, int>>> order;
  for (const auto& [at, life] : found.lives) order.emplace_back(life.forward, life.release, at);
  std::ranges::sort(order);
  std::vector<int> free_after;      // by slot: the last position at which it is taken
  std::map<int, int> microbatches;  // those that have a slot
  for (const auto& [forward, release, at] : order) {
    const auto known = whole_microbatches ? microbatches.find(at.second) : microbatches.end();
    int slot = known == microbatches.end() ? kNone : known->second;
    if (slot == kNone) {
      const auto free = std::ranges::find_if(free_after, [&, start = forward](int end) { return end < start; });
      slot = static_cast<int>(free - free_after.begin());
      if (free == free_after.end()) free_after.push_back(0);
      free_after[slot] = release;
      if (whole_microbatches) microbatches.emplace(at.second, slot);
    }
    found.lives.at(at).slot = slot;
  }
  found.num_slots = static_cast<int>(free_after.size());
  return found;
}

}  // namespace plumb
