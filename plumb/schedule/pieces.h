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

 private:
  struct Way {
    std::vector<double> forward, input, weight, full, activation, held;  // prefix sums
    Costs::Working working;                                              // by piece
  };
  std::vector<double> leaving(const PieceCosts& pieces, double PieceCosts::Value::*of, double times) const;

  std::size_t size_;
  double seconds_per_copied_;
  std::vector<Way> ways_;
  std::vector<double> resident_, gradient_;
  std::vector<double> seconds_, bytes_;  // messages that leave the pieces [first, last), by first and last
};

}  // namespace plumb::schedule_internal
