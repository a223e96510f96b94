// Schedules whose two stages a rank form a V: rank r holds stage r and stage 2p - 1 - r.
#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
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
    inputs_[chunk].push_back({backwards_[chunk], turn_++});
    row_.push_back(Action::input(stages_[chunk], backwards_[chunk]++));
  }
  void full(int chunk) { row_.push_back(Action::backward(stages_[chunk], backwards_[chunk]++)); }
  void backward(int chunk, bool split) { split ? input(chunk) : full(chunk); }
  void overlapped(int forward_chunk, int backward_chunk) {
    row_.push_back(Action::overlap(Action::forward(stages_[forward_chunk], forwards_[forward_chunk]++),
                                   Action::backward(stages_[backward_chunk], backwards_[backward_chunk]++)));
  }
  // Returns the oldest weight backward that is due, of one chunk; false if there is none.
  bool weight(int chunk) {
    if (weights_[chunk] == inputs_[chunk].size()) return false;
    row_.push_back(Action::weight(stages_[chunk], inputs_[chunk][weights_[chunk]++].microbatch));
    return true;
  }
  // Returns the oldest weight backward that is due, of either chunk.
  bool weight() {
    bool due[2] = {weights_[0] < inputs_[0].size(), weights_[1] < inputs_[1].size()};
    if (!due[0] && !due[1]) return false;
    bool second = !due[0] || (due[1] && inputs_[1][weights_[1]].turn < inputs_[0][weights_[0]].turn);
    return weight(second ? 1 : 0);
  }
  int forwards(int chunk) const { return forwards_[chunk]; }

 private:
  std::vector<Action>& row_;
  int stages_[2];
  int forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
  struct Input {
    int microbatch, turn;
  };
  std::vector<Input> inputs_[2];  // those that left a weight backward to do
  std::size_t weights_[2] = {0, 0};
  int turn_ = 0;
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

namespace {

// One rank of a DualPipeV over `num_ranks` ranks: `stage0` on the way down the V, `stage1` on the way up.
void dual_pipe_row(std::vector<Action>& actions, int rank, int num_ranks, int count, int stage0, int stage1) {
  RowWriter row(actions, stage0, stage1);
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

}  // namespace

Schedule dual_pipe_v_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("DualPipeV", num_ranks, num_microbatches, 2, true);
  int count = std::max(2 * num_ranks, num_microbatches);
  for (int rank = 0; rank < num_ranks; ++rank) {
    dual_pipe_row(schedule.rows[rank], rank, num_ranks, count, rank, 2 * num_ranks - 1 - rank);
  }
  drop_microbatches(schedule, num_microbatches);
  return schedule;
}

// A rank of the first half and its mirror image are one rank of a DualPipeV each: down the V with the microbatches that
// enter at their own end, up with those that come from the other end.
Schedule dual_pipe_schedule(int num_ranks, int num_microbatches) {
  Schedule schedule = new_table("DualPipe", num_ranks, num_microbatches, 1, false);
  if (num_ranks % 2 != 0) {
    throw Error(ErrorKind::InvalidArgument,
                str("DualPipe pairs each rank with one at the other end, which ", num_ranks, " ranks do not allow"), "",
                "use an even number of ranks, or DualPipeV");
  }
  int first_way = (num_microbatches + 1) / 2, other_way = num_microbatches - first_way;
  schedule.placement.reverse_from = first_way;
  for (int stage = 0; stage < num_ranks; ++stage) schedule.placement.reverse_ranks.push_back(num_ranks - 1 - stage);
  int count = std::max(num_ranks, first_way);
  for (int rank = 0; rank < num_ranks; ++rank) {
    int near = std::min(rank, num_ranks - 1 - rank), far = num_ranks - 1 - near;
    std::vector<Action> row;
    dual_pipe_row(row, near, num_ranks / 2, count, near, far);
    // This rank takes the near stage's microbatches that enter at its own end, and the far stage's others.
    bool low = rank == near;
    auto kept = [&](Action part) {
      bool first = (part.stage == near) == low;
      if (part.microbatch >= (first ? first_way : other_way)) return Action::idle();
      if (!first) part.microbatch += first_way;
      return part;
    };
    for (const Action& action : row) {
      Action one = kept(action.first_part());
      Action two = action.kind == ActionKind::Overlap ? kept(action.second_part()) : Action::idle();
      if (!one.is_idle() && !two.is_idle()) {
        schedule.rows[rank].push_back(Action::overlap(one, two));
      } else if (!one.is_idle() || !two.is_idle()) {
        schedule.rows[rank].push_back(one.is_idle() ? two : one);
      }
    }
  }
  return schedule;
}

}  // namespace plumb
