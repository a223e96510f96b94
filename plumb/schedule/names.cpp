// Schedules by name, and what the generators share.
#include <algorithm>
#include <cctype>
#include <functional>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/generators_internal.h"

namespace plumb {
namespace schedule_internal {

Schedule new_table(const char* name, int num_ranks, int num_microbatches, int stages_per_rank, bool v_shape) {
  constexpr int kMost = 1 << 24;
  auto fits = [](int count) { return count >= 1 && count <= kMost; };
  if (!fits(num_ranks) || !fits(num_microbatches) || !fits(stages_per_rank) || num_ranks > kMost / stages_per_rank ||
      num_microbatches > kMost / (num_ranks * stages_per_rank)) {
    throw Error(ErrorKind::InvalidArgument,
                str(name, " cannot be made for ", num_ranks, " ranks, ", num_microbatches, " microbatches and ",
                    stages_per_rank, " stages a rank"),
                "", "give at least one of each, and a product of the three of at most 2^24");
  }
  Schedule schedule;
  schedule.name = name;
  schedule.num_microbatches = num_microbatches;
  schedule.placement = v_shape ? v_placement(num_ranks, stages_per_rank) : loop_placement(num_ranks, stages_per_rank);
  schedule.rows.resize(num_ranks);
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

using Generator = std::function<Schedule(int ranks, int microbatches, int stages_per_rank)>;

Generator one_stage(Schedule (*make)(int, int)) {
  return [make](int ranks, int microbatches, int) { return make(ranks, microbatches); };
}

struct Entry {
  Entry(const char* name, const char* summary, ScheduleTraits form, Generator generator)
      : traits(std::move(form)), make(std::move(generator)) {
    traits.name = name;
    traits.summary = summary;
  }
  ScheduleTraits traits;
  Generator make;
};

// Returns the list of schedules.
const std::vector<Entry>& entries() {
  static const ScheduleTraits loops{.max_stages_per_rank = kMany}, halves{.splits_backward = true};
  static const ScheduleTraits v{
      .v_shape = true, .min_stages_per_rank = 2, .max_stages_per_rank = 2, .splits_backward = true};
  static const std::vector<Entry> table = {
      {"GPipe", "All forwards, then all backwards (arXiv 1811.06965).", {}, one_stage(gpipe_schedule)},
      {"1F1B",
       "Forwards until the first backward can come, then one forward, one backward (arXiv 2006.09503).",
       {},
       one_stage(one_f_one_b_schedule)},
      {"Interleaved1F1B",
       "1F1B over several stages a rank, microbatches in rounds (arXiv 2104.04473). Any number of microbatches.", loops,
       interleaved_1f1b_schedule},
      {"LoopedBFS", "All microbatches through one stage of a rank before the next stage (arXiv 2211.05953).", loops,
       [](int ranks, int microbatches, int stages) { return looped_bfs_schedule(ranks, microbatches, stages); }},
      {"InterleavedZeroBubble", "Interleaved 1F1B with weight backwards where a rank would wait (arXiv 2401.10241).",
       ScheduleTraits{.max_stages_per_rank = kMany, .splits_backward = true}, interleaved_zero_bubble_schedule},
      {"ZBVZeroBubble",
       "Two stages a rank in a V; no bubble if forward, input and weight backward cost the same (arXiv 2401.10241, "
       "section 6).",
       v, one_stage(zbv_schedule)},
      {"DualPipeV",
       "Two stages a rank in a V, forwards and backwards of different microbatches in pairs (DualPipe cut in half).", v,
       one_stage(dual_pipe_v_schedule)},
      {"ZBH1", "1F1B with the backward halved, in 1F1B's memory (arXiv 2401.10241).", halves,
       one_stage(zb_h1_schedule)},
      {"ZBH2", "1F1B with the backward halved, with about twice its memory and hardly a bubble (arXiv 2401.10241).",
       halves, one_stage(zb_h2_schedule)},
      {"VHalf", "Two stages a rank in a V, about half of 1F1B's memory (arXiv 2405.15362).", v,
       one_stage(v_half_schedule)},
      {"VMin", "Two stages a rank in a V, about a third of 1F1B's memory (arXiv 2405.15362).", v,
       one_stage(v_min_schedule)},
      {"DualPipe",
       "Every stage on two ranks, s and p - 1 - s; half of the microbatches enter at either end (arXiv 2412.19437).",
       ScheduleTraits{.bidirectional = true, .splits_backward = true}, one_stage(dual_pipe_schedule)},
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
  throw Error(ErrorKind::UnknownName, "there is no schedule named '" + std::string(name) + "'", "",
              "use " + join(schedule_names()));
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

std::vector<std::string> usual_schedules() {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) {
    if (!entry.traits.bidirectional) names.push_back(entry.traits.name);
  }
  names.emplace_back("Searched");
  return names;
}

const ScheduleTraits& schedule_traits(std::string_view name) { return entry(name).traits; }

Schedule make_schedule(std::string_view name, int num_ranks, int num_microbatches, int stages_per_rank) {
  const Entry& found = entry(name);
  const ScheduleTraits& traits = found.traits;
  if (stages_per_rank == 0) stages_per_rank = std::min(traits.max_stages_per_rank, 2);
  if (stages_per_rank < traits.min_stages_per_rank || stages_per_rank > traits.max_stages_per_rank) {
    throw Error(ErrorKind::InvalidArgument,
                str(traits.name, " has ", traits.min_stages_per_rank,
                    traits.max_stages_per_rank == traits.min_stages_per_rank ? "" : " or more", " stages a rank, not ",
                    stages_per_rank));
  }
  return found.make(num_ranks, num_microbatches, stages_per_rank);
}

}  // namespace plumb
