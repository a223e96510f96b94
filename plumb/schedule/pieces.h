// Sums of pieces' costs for any stage in constant time. Inside of joint_search().
#pragma once

#include <functional>
#include <vector>

#include "plumb/schedule/joint.h"
#include "plumb/schedule/list_schedule.h"

namespace plumb::schedule_internal {

// Throws Error(InvalidArgument) for lists of other lengths, and for costs that are no durations or sizes.
void check_pieces(const PieceCosts& pieces);

class PieceSums {
 public:
  // `link`: times of messages are multiplied by it; `off`: so are the times of a piece.
  PieceSums(const PieceCosts& pieces, double link, const std::function<double(int piece)>& off);

  // `latency`: of each message.
  StageTimes times(const PieceStages& stages, const std::vector<int>& rank, int num_ranks, double latency) const;
  // Time of the messages from the pieces [first, last) to later ones, without latency.
  double message(int first, int last) const {
    return message_[static_cast<std::size_t>(first) * (size_ + 1) + static_cast<std::size_t>(last)];
  }

 private:
  struct Way {
    std::vector<double> forward, input, weight, full, activation, held;  // prefix sums
  };
  std::size_t size_;
  std::vector<Way> ways_;
  std::vector<double> resident_, working_, message_;
};

}  // namespace plumb::schedule_internal
