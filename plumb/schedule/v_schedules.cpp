// Schedules whose two stages a rank form a V: rank r holds stage r and stage 2p - 1 - r.
#include <algorithm>
#include <deque>

#include "plumb/schedule/generators.h"
#include "plumb/schedule/generators_internal.h"

namespace plumb {

using schedule_internal::drop_microbatches;
using schedule_internal::new_table;

namespace {

// Appends actions to a row and counts each chunk's microbatches on.
class RowWriter {
 public:
  RowWriter(std::vector<Action>& row, int stage0, int stage1) : row_(row), stages_{stage0, stage1} {}

  void forward(int chunk) { row_.push_back(Action::forward(stages_[chunk], forwards_[chunk]++)); }
  void input(int chunk) {
    pending_.push_back(Action::weight(stages_[chunk], backwards_[chunk]));
    row_.push_back(Action::input(stages_[chunk], backwards_[chunk]++));
  }
  void full(int chunk) { row_.push_back(Action::backward(stages_[chunk], backwards_[chunk]++)); }
  void backward(int chunk, bool split) { split ? input(chunk) : full(chunk); }
  void overlapped(int forward_chunk, int backward_chunk) {
    row_.push_back(Action::overlap(Action::forward(stages_[forward_chunk], forwards_[forward_chunk]++),
                                   Action::backward(stages_[backward_chunk], backwards_[backward_chunk]++)));
  }
  // The oldest weight backward that is due, of any chunk or of one.
  bool weight(int chunk = -1) {
    auto it = std::find_if(pending_.begin(), pending_.end(),
                           [&](const Action& action) { return chunk < 0 || action.stage == stages_[chunk]; });
    if (it == pending_.end()) return false;
    row_.push_back(*it);
    pending_.erase(it);
    return true;
  }
  int forwards(int chunk) const { return forwards_[chunk]; }

 private:
  std::vector<Action>& row_;
  int stages_[2];
  int forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
  std::deque<Action> pending_;
};

}  // namespace

Schedule zbv_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("ZBVZeroBubble", num_ranks, num_microbatches, 2, true);
  // The pattern needs this many microbatches to close; those that are not there are taken out again.
  int count = std::max(2 * num_ranks - 1, num_microbatches);
  for (int rank = 0; rank < num_ranks; ++rank) {
    RowWriter row(schedule.rows[rank], rank, 2 * num_ranks - 1 - rank);
    auto input_and_weight = [&row](int chunk) {
      row.input(chunk);
      row.weight(chunk);
    };
    // Down the V until the first forward comes back up, then the first backwards of the upper leg.
    for (int i = 0; i < 2 * (num_ranks - rank) - 1; ++i) row.forward(0);
    for (int i = 0; i < rank; ++i) {
      row.forward(1);
      row.forward(0);
    }
    for (int i = 0; i < num_ranks - rank; ++i) {
      row.forward(1);
      input_and_weight(1);
    }
    while (row.forwards(1) < row.forwards(0) || row.forwards(0) < count) {
      if (row.forwards(0) < count) row.forward(0);
      input_and_weight(0);
      row.forward(1);
      input_and_weight(1);
    }
    // No forwards left: inputs first, weights where a rank would wait.
    for (int i = 0; i < rank; ++i) {
      row.input(0);
      row.input(1);
    }
    for (int i = 0; i < num_ranks - rank; ++i) {
      row.input(0);
      row.weight(0);
    }
    while (row.weight(1)) {
    }
    while (row.weight(0)) {
    }
  }
  drop_microbatches(schedule, num_microbatches);
  return schedule;
}

Schedule dual_pipe_v_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("DualPipeV", num_ranks, num_microbatches, 2, true);
  int count = std::max(2 * num_ranks, num_microbatches);
  for (int rank = 0; rank < num_ranks; ++rank) {
    RowWriter row(schedule.rows[rank], rank, 2 * num_ranks - 1 - rank);
    int below = num_ranks - 1 - rank;
    for (int i = 0; i < 2 * below; ++i) row.forward(0);
    for (int i = 0; i < rank + 1; ++i) {
      row.forward(0);
      row.forward(1);
    }
    for (int i = 0; i < below; ++i) {
      row.input(1);
      row.weight();
      row.forward(1);
    }
    for (int i = 0; i < count - 2 * num_ranks + rank + 1; ++i) {
      if (i == 0 && below == 0) {
        row.forward(0);  // at the turn of the V nothing is gained by overlapping the first pair
        row.full(1);
      } else {
        row.overlapped(0, 1);
      }
      row.overlapped(1, 0);
    }
    for (int i = 0; i < below; ++i) {
      row.full(1);
      row.overlapped(1, 0);
    }
    // The backwards left over: the second half of them split, from chunk 1 on odd and chunk 0 on even ranks.
    int left = rank + 1;
    for (int i = 0; i < left; ++i) {
      row.backward(1, i > left / 2 || (i == left / 2 && rank % 2 == 1));
      row.backward(0, i >= left / 2);
    }
    for (int i = 0; i < below; ++i) {
      row.weight();
      row.input(0);
    }
    while (row.weight()) {
    }
  }
  drop_microbatches(schedule, num_microbatches);
  return schedule;
}

}  // namespace plumb
