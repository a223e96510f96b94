// The schedules of one pass or several loops; V-shaped ones are in v_schedules.cpp.
#include "plumb/schedule/generators.h"

#include <algorithm>

#include "plumb/schedule/generators_internal.h"

namespace plumb {

using schedule_internal::new_table;

namespace {

// Runs all microbatches through one stage of a rank before the next; `ascending`: backwards from the first one on.
Schedule stage_by_stage(const char* name, int num_ranks, int num_microbatches, int stages_per_rank, bool ascending) {
  Schedule schedule = new_table(name, num_ranks, num_microbatches, stages_per_rank, false);
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

struct Step {
  int chunk, microbatch;
};

// A rank's forwards (or backwards, chunks from the last) in rounds: a round of microbatches through one chunk, then the
// next chunk, then the next round.
std::vector<Step> steps_in_rounds(int num_ranks, int num_microbatches, int chunks, bool backward) {
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
// weight_lag < 0: full backwards; otherwise halves, with that many inputs backwards ahead of the first weight backward.
std::vector<Action> interleaved_row(int rank, int num_ranks, int num_microbatches, int chunks, int hop,
                                    int weight_lag) {
  std::vector<Step> forwards = steps_in_rounds(num_ranks, num_microbatches, chunks, false);
  std::vector<Step> backwards = steps_in_rounds(num_ranks, num_microbatches, chunks, true);
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

// lag: -1 for full backwards, else the weight_lag of rank 1; that of rank r is r times as much.
Schedule in_rounds(const char* name, int num_ranks, int num_microbatches, int stages_per_rank, int hop, int lag) {
  Schedule schedule = new_table(name, num_ranks, num_microbatches, stages_per_rank, false);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.rows[rank] =
        interleaved_row(rank, num_ranks, num_microbatches, stages_per_rank, hop, lag < 0 ? lag : lag * rank);
  }
  return schedule;
}

}  // namespace

Schedule gpipe_schedule(int num_ranks, int num_microbatches) {
  return stage_by_stage("GPipe", num_ranks, num_microbatches, 1, true);
}

Schedule looped_bfs_schedule(int num_ranks, int num_microbatches, int stages_per_rank, bool ascending) {
  return stage_by_stage("LoopedBFS", num_ranks, num_microbatches, stages_per_rank, ascending);
}

Schedule one_f_one_b_schedule(int num_ranks, int num_microbatches) {
  return in_rounds("1F1B", num_ranks, num_microbatches, 1, 1, -1);
}

Schedule interleaved_1f1b_schedule(int num_ranks, int num_microbatches, int stages_per_rank) {
  return in_rounds("Interleaved1F1B", num_ranks, num_microbatches, stages_per_rank, 2, -1);
}

Schedule interleaved_zero_bubble_schedule(int num_ranks, int num_microbatches, int stages_per_rank) {
  return in_rounds("InterleavedZeroBubble", num_ranks, num_microbatches, stages_per_rank, 1, 1);
}

Schedule zb_h1_schedule(int num_ranks, int num_microbatches) {
  return in_rounds("ZBH1", num_ranks, num_microbatches, 1, 1, 1);
}

Schedule zb_h2_schedule(int num_ranks, int num_microbatches) {
  return in_rounds("ZBH2", num_ranks, num_microbatches, 1, 2, 2);
}

}  // namespace plumb
