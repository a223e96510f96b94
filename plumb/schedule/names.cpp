// Schedules by name, and what the generators share.
#include <algorithm>
#include <cctype>

#include "plumb/core/error.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/generators_internal.h"

namespace plumb {
namespace schedule_internal {

Schedule new_table(const char* name, int num_ranks, int num_microbatches, int stages_per_rank, bool v_shape) {
  constexpr int kMost = 1 << 24;
  auto fits = [](int count) { return count >= 1 && count <= kMost; };
  if (!fits(num_ranks) || !fits(num_microbatches) || !fits(stages_per_rank) || num_ranks > kMost / stages_per_rank) {
    throw Error(ErrorKind::InvalidArgument,
                std::string(name) + " cannot be made for " + std::to_string(num_ranks) + " ranks, " +
                    std::to_string(num_microbatches) + " microbatches and " + std::to_string(stages_per_rank) +
                    " stages a rank",
                "", "give at least one of each");
  }
  Schedule schedule;
  schedule.name = name;
  schedule.num_microbatches = num_microbatches;
  schedule.placement = v_shape ? v_placement(num_ranks, stages_per_rank) : loop_placement(num_ranks, stages_per_rank);
  schedule.rows.resize(static_cast<std::size_t>(num_ranks));
  return schedule;
}

void drop_microbatches(Schedule& schedule, int num_microbatches) {
  for (auto& row : schedule.rows) {
    std::vector<Action> kept;
    for (const Action& action : row) {
      bool first = action.microbatch < num_microbatches, second = action.other_microbatch < num_microbatches;
      if (action.kind == ActionKind::Overlap && !(first && second)) {
        if (first) kept.push_back(action.first_part());
        if (second) kept.push_back(action.second_part());
      } else if (first) {
        kept.push_back(action);
      }
    }
    row = std::move(kept);
  }
}

}  // namespace schedule_internal

namespace {

constexpr int kMany = 1 << 20;

struct Entry {
  ScheduleTraits traits;
  Schedule (*make)(int ranks, int microbatches, int stages_per_rank);
};

const std::vector<Entry>& entries() {
  static const std::vector<Entry> table = {
      {{"GPipe", false, false, 1, 1, false}, [](int p, int n, int) { return gpipe_schedule(p, n); }},
      {{"1F1B", false, false, 1, 1, false}, [](int p, int n, int) { return one_f_one_b_schedule(p, n); }},
      {{"Interleaved1F1B", false, false, 1, kMany, false}, interleaved_1f1b_schedule},
      {{"LoopedBFS", false, false, 1, kMany, false}, [](int p, int n, int v) { return looped_bfs_schedule(p, n, v); }},
      {{"InterleavedZeroBubble", false, false, 1, kMany, true}, interleaved_zero_bubble_schedule},
      {{"ZBVZeroBubble", true, false, 2, 2, true}, [](int p, int n, int) { return zbv_schedule(p, n); }},
      {{"DualPipeV", true, false, 2, 2, true}, [](int p, int n, int) { return dual_pipe_v_schedule(p, n); }},
      {{"ZBH1", false, false, 1, 1, true}, [](int p, int n, int) { return zb_h1_schedule(p, n); }},
      {{"ZBH2", false, false, 1, 1, true}, [](int p, int n, int) { return zb_h2_schedule(p, n); }},
      {{"VHalf", true, false, 2, 2, true}, [](int p, int n, int) { return v_half_schedule(p, n); }},
      {{"VMin", true, false, 2, 2, true}, [](int p, int n, int) { return v_min_schedule(p, n); }},
      {{"DualPipe", false, true, 1, 1, true}, [](int p, int n, int) { return dual_pipe_schedule(p, n); }},
  };
  return table;
}

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

const Entry& entry(std::string_view name) {
  for (const Entry& candidate : entries()) {
    if (same_name(candidate.traits.name, name)) return candidate;
  }
  std::string known;
  for (const std::string& other : schedule_names()) known += (known.empty() ? "" : ", ") + other;
  throw Error(ErrorKind::UnknownName, "there is no schedule named '" + std::string(name) + "'", "", "use " + known);
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Entry& entry : entries()) list.push_back(entry.traits.name);
    return list;
  }();
  return names;
}

const ScheduleTraits& schedule_traits(std::string_view name) { return entry(name).traits; }

Schedule make_schedule(std::string_view name, int num_ranks, int num_microbatches, int stages_per_rank) {
  const Entry& found = entry(name);
  const ScheduleTraits& traits = found.traits;
  if (stages_per_rank == 0) stages_per_rank = std::min(traits.max_stages_per_rank, 2);
  if (stages_per_rank < traits.min_stages_per_rank || stages_per_rank > traits.max_stages_per_rank) {
    throw Error(ErrorKind::InvalidArgument,
                traits.name + " has " + std::to_string(traits.min_stages_per_rank) +
                    (traits.max_stages_per_rank == traits.min_stages_per_rank ? "" : " or more") +
                    " stages a rank, not " + std::to_string(stages_per_rank));
  }
  return found.make(num_ranks, num_microbatches, stages_per_rank);
}

}  // namespace plumb
