// The schedules of one pass or several loops; V-shaped ones are in v_schedules.cpp.
#include "plumb/schedule/generators.h"

#include <algorithm>

#include "plumb/schedule/generators_internal.h"

namespace plumb {

using schedule_internal::new_table;

Schedule gpipe_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("GPipe", num_ranks, num_microbatches, 1, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    auto& row = schedule.rows[rank];
    for (int m = 0; m < num_microbatches; ++m) row.push_back(Action::forward(rank, m));
    for (int m = 0; m < num_microbatches; ++m) row.push_back(Action::backward(rank, m));
  }
  return schedule;
}

Schedule one_f_one_b_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("1F1B", num_ranks, num_microbatches, 1, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    auto& row = schedule.rows[rank];
    int ahead = std::min(num_ranks - 1 - rank, num_microbatches);
    for (int m = 0; m < ahead; ++m) row.push_back(Action::forward(rank, m));
    for (int m = 0; m < num_microbatches; ++m) {
      if (m + ahead < num_microbatches) row.push_back(Action::forward(rank, m + ahead));
      row.push_back(Action::backward(rank, m));
    }
  }
  return schedule;
}

Schedule looped_bfs_schedule(int num_ranks, int num_microbatches, int stages_per_rank, bool ascending) {
  Schedule schedule = new_table("LoopedBFS", num_ranks, num_microbatches, stages_per_rank, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    auto& row = schedule.rows[rank];
    for (int chunk = 0; chunk < stages_per_rank; ++chunk) {
      for (int m = 0; m < num_microbatches; ++m) row.push_back(Action::forward(chunk * num_ranks + rank, m));
    }
    for (int chunk = stages_per_rank - 1; chunk >= 0; --chunk) {
      for (int i = 0; i < num_microbatches; ++i) {
        row.push_back(Action::backward(chunk * num_ranks + rank, ascending ? i : num_microbatches - 1 - i));
      }
    }
  }
  return schedule;
}

namespace {

struct Step {
  int chunk, microbatch;
};

// A rank's forwards (or backwards, chunks from the last) in rounds: a round of microbatches through one chunk, then the
// next chunk, then the next round.
std::vector<Step> in_rounds(int num_ranks, int num_microbatches, int chunks, bool backward) {
  std::vector<Step> steps;
  int rounds = std::max(1, num_microbatches / num_ranks);
  int size = num_microbatches / rounds, longer = num_microbatches % rounds;
  for (int round = 0, first = 0; round < rounds; ++round) {
    int count = size + (round < longer ? 1 : 0);
    for (int i = 0; i < chunks; ++i) {
      for (int m = first; m < first + count; ++m) steps.push_back({backward ? chunks - 1 - i : i, m});
    }
    first += count;
  }
  return steps;
}

// Forwards until a backward can come, `hop` more for every rank below; 1F1B; the rest. Microbatches in rounds.
// weight_lag < 0: full backwards; otherwise halves, with so many inputs backwards ahead of the first weight backward.
std::vector<Action> interleaved_row(int rank, int num_ranks, int num_microbatches, int chunks, int hop,
                                    int weight_lag) {
  std::vector<Step> forwards = in_rounds(num_ranks, num_microbatches, chunks, false);
  std::vector<Step> backwards = in_rounds(num_ranks, num_microbatches, chunks, true);
  int total = static_cast<int>(forwards.size());
  int rounds = std::max(1, num_microbatches / num_ranks);
  int round = (num_microbatches + rounds - 1) / rounds;
  int ahead = std::min((chunks - 1) * round + hop * (num_ranks - 1 - rank), total);
  auto stage = [&](const Step& step) { return step.chunk * num_ranks + rank; };
  std::vector<Action> row;
  int weights = 0;
  auto push_weight = [&] {
    const Step& step = backwards[weights++];
    row.push_back(Action::weight(stage(step), step.microbatch));
  };
  for (int i = 0; i < ahead; ++i) row.push_back(Action::forward(stage(forwards[i]), forwards[i].microbatch));
  for (int i = 0; i < total; ++i) {
    if (i + ahead < total) {
      row.push_back(Action::forward(stage(forwards[i + ahead]), forwards[i + ahead].microbatch));
    }
    const Step& step = backwards[i];
    if (weight_lag < 0) {
      row.push_back(Action::backward(stage(step), step.microbatch));
    } else {
      row.push_back(Action::input(stage(step), step.microbatch));
      if (i >= weight_lag) push_weight();
    }
  }
  while (weight_lag >= 0 && weights < total) push_weight();
  return row;
}

}  // namespace

Schedule interleaved_1f1b_schedule(int num_ranks, int num_microbatches, int stages_per_rank) {
  Schedule schedule = new_table("Interleaved1F1B", num_ranks, num_microbatches, stages_per_rank, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.rows[rank] = interleaved_row(rank, num_ranks, num_microbatches, stages_per_rank, 2, -1);
  }
  return schedule;
}

Schedule interleaved_zero_bubble_schedule(int num_ranks, int num_microbatches, int stages_per_rank) {
  Schedule schedule = new_table("InterleavedZeroBubble", num_ranks, num_microbatches, stages_per_rank, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.rows[rank] = interleaved_row(rank, num_ranks, num_microbatches, stages_per_rank, 1, rank);
  }
  return schedule;
}

Schedule zb_h1_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("ZBH1", num_ranks, num_microbatches, 1, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.rows[rank] = interleaved_row(rank, num_ranks, num_microbatches, 1, 1, rank);
  }
  return schedule;
}

Schedule zb_h2_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("ZBH2", num_ranks, num_microbatches, 1, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.rows[rank] = interleaved_row(rank, num_ranks, num_microbatches, 1, 2, 2 * rank);
  }
  return schedule;
}

}  // namespace plumb
