// V schedules with controllable memory (arXiv 2405.15362): one microbatch's way through the V, every six ticks.
//
// With F = I = W = 1 a microbatch takes six ticks of every rank (two chunks), so blocks six ticks apart fill a rank
// exactly if no two passes of a block fall on the same tick modulo six. How fast the passes move from rank to rank sets
// how long activations live, hence the memory: the sum of the lives of both chunks over six.
#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "plumb/schedule/generators.h"
#include "plumb/schedule/generators_internal.h"

namespace plumb {
namespace {

constexpr int kPeriod = 6;
enum Pass { kForward0, kForward1, kInput1, kInput0, kWeight1, kWeight0, kPasses };
using Block = std::vector<std::array<int, kPasses>>;  // by rank: the tick of every pass

// hops: ticks from rank to rank of F0 (down), F1 (up), I1 (down), I0 (up). pauses: extra ticks at the V's three turns.
std::optional<Block> block_of(int num_ranks, const std::array<int, 4>& hops, const std::array<int, 3>& pauses) {
  Block block(static_cast<std::size_t>(num_ranks));
  int last = num_ranks - 1;
  int turn1 = hops[0] * last + 1 + pauses[0];
  int turn2 = turn1 + hops[1] * last + 1 + pauses[1];
  int turn3 = turn2 + hops[2] * last + 1 + pauses[2];
  for (int rank = 0; rank < num_ranks; ++rank) {
    auto& ticks = block[rank];
    ticks[kForward0] = hops[0] * rank;
    ticks[kForward1] = turn1 + hops[1] * (last - rank);
    ticks[kInput1] = turn2 + hops[2] * rank;
    ticks[kInput0] = turn3 + hops[3] * (last - rank);
    std::array<bool, kPeriod> taken{};
    for (Pass pass : {kForward0, kForward1, kInput1, kInput0}) {
      bool& slot = taken[ticks[pass] % kPeriod];
      if (slot) return std::nullopt;
      slot = true;
    }
    // Weights into what is left, as soon as may be.
    for (auto [weight, input] : {std::pair(kWeight1, kInput1), std::pair(kWeight0, kInput0)}) {
      int tick = ticks[input] + 1;
      while (taken[tick % kPeriod]) ++tick;
      taken[tick % kPeriod] = true;
      ticks[weight] = tick;
    }
  }
  return block;
}

std::vector<Action> row_of(const std::array<int, kPasses>& ticks, int rank, int num_ranks, int num_microbatches) {
  std::vector<std::pair<long, Action>> passes;
  int low = rank, high = 2 * num_ranks - 1 - rank;
  for (int m = 0; m < num_microbatches; ++m) {
    const Action actions[kPasses] = {Action::forward(low, m), Action::forward(high, m), Action::input(high, m),
                                     Action::input(low, m),   Action::weight(high, m),  Action::weight(low, m)};
    for (int pass = 0; pass < kPasses; ++pass) {
      passes.emplace_back(static_cast<long>(m) * kPeriod + ticks[pass], actions[pass]);
    }
  }
  std::ranges::sort(passes, {}, &std::pair<long, Action>::first);
  std::vector<Action> row;
  for (const auto& [tick, action] : passes) row.push_back(action);
  return row;
}

// Returns the longest sum of lives over the ranks: what sets the memory.
int longest_life(const Block& block) {
  int longest = 0;
  for (const auto& ticks : block) {
    longest = std::max(longest, ticks[kWeight0] - ticks[kForward0] + ticks[kWeight1] - ticks[kForward1] + 2);
  }
  return longest;
}

// After a rank's last forward the blocks leave gaps: runs the inputs there as soon as they can, weights in between.
// That holds nothing longer than before the last forward. Tick by tick with F = I = W = 1.
void fill_tails(Schedule& schedule) {
  const int stages = schedule.num_stages();
  const std::size_t microbatches = static_cast<std::size_t>(schedule.num_microbatches);
  constexpr int kNever = std::numeric_limits<int>::max();
  std::vector<int> forward_end(static_cast<std::size_t>(stages) * microbatches, kNever), input_end = forward_end;
  auto at = [&](int stage, int m) {
    return static_cast<std::size_t>(stage) * microbatches + static_cast<std::size_t>(m);
  };
  auto ready = [&](const Action& action, int tick) {
    int stage = action.stage, m = action.microbatch;
    if (action.kind == ActionKind::Forward) return stage == 0 || forward_end[at(stage - 1, m)] <= tick;
    if (action.kind == ActionKind::BackwardWeight) return input_end[at(stage, m)] <= tick;
    return forward_end[at(stage, m)] <= tick && (stage + 1 == stages || input_end[at(stage + 1, m)] <= tick);
  };
  struct Rank {
    std::vector<Action> done;
    std::size_t next = 0, tail = 0;
    std::deque<Action> inputs, weights;  // input backwards and weight backwards of the tail
  };
  std::vector<Rank> ranks(schedule.rows.size());
  std::size_t left = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto& row = schedule.rows[r];
    left += row.size();
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i].kind == ActionKind::Forward) ranks[r].tail = i + 1;
    }
    for (std::size_t i = ranks[r].tail; i < row.size(); ++i) {
      (row[i].kind == ActionKind::BackwardInput ? ranks[r].inputs : ranks[r].weights).push_back(row[i]);
    }
  }
  for (int tick = 0; left > 0; ++tick) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      Rank& rank = ranks[r];
      const auto& row = schedule.rows[r];
      Action action;
      if (rank.next < rank.tail) {
        if (ready(row[rank.next], tick)) action = row[rank.next++];
      } else {
        for (auto* list : {&rank.inputs, &rank.weights}) {
          if (list->empty() || !ready(list->front(), tick)) continue;
          action = list->front();
          list->pop_front();
          break;
        }
      }
      if (action.is_idle()) continue;
      rank.done.push_back(action);
      --left;
      if (action.kind == ActionKind::Forward) forward_end[at(action.stage, action.microbatch)] = tick + 1;
      if (action.kind == ActionKind::BackwardInput) input_end[at(action.stage, action.microbatch)] = tick + 1;
    }
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) schedule.rows[r] = std::move(ranks[r].done);
}

// Repeats the block with the least memory, then the shortest, among all with the given sum of hops (the same life on
// all ranks: F0 and I0, F1 and I1 share it evenly).
Schedule repeat_block(const char* name, int num_ranks, int num_microbatches, int hops_of_a_leg) {
  Schedule schedule = schedule_internal::new_table(name, num_ranks, num_microbatches, 2, true);
  std::optional<Block> best;
  std::tuple<int, int> best_score;
  for (int f0 = 1; f0 < hops_of_a_leg; ++f0) {
    for (int f1 = 1; f1 < hops_of_a_leg; ++f1) {
      for (int pause = 0; pause < kPeriod * kPeriod * kPeriod; ++pause) {
        std::array<int, 3> pauses = {pause % kPeriod, pause / kPeriod % kPeriod, pause / kPeriod / kPeriod};
        auto block = block_of(num_ranks, {f0, f1, hops_of_a_leg - f1, hops_of_a_leg - f0}, pauses);
        if (!block) continue;
        std::tuple<int, int> score = {longest_life(*block), (*block)[0][kWeight0]};
        if (!best || score < best_score) {
          best = std::move(block);
          best_score = score;
        }
      }
    }
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.rows[rank] = row_of((*best)[rank], rank, num_ranks, num_microbatches);
  }
  fill_tails(schedule);
  return schedule;
}

}  // namespace

Schedule v_min_schedule(int num_ranks, int num_microbatches) {
  return repeat_block("VMin", num_ranks, num_microbatches, 2);
}

Schedule v_half_schedule(int num_ranks, int num_microbatches) {
  return repeat_block("VHalf", num_ranks, num_microbatches, 3);
}

}  // namespace plumb
