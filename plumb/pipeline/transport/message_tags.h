// The tags of c10d's messages. Each transport of a group has a range of them.
#pragma once

#include "plumb/pipeline/transport/message.h"

namespace plumb {

class MessageTags {
 public:
  // `range`: the transport's number in its group.
  explicit MessageTags(int range) : first_(kFirst + range % kRanges * kInRange) {}

  // Returns the tag of the buffer's class, so that no message meets a buffer that is too short for it.
  int message(int size_class) const { return first_ + size_class; }
  int second_part(int size_class, int position) const {
    return first_ + kFirstOfSecondParts + size_class * kPositions + position % kPositions;
  }

 private:
  static constexpr int kRanges = 512, kInRange = 1 << 21, kFirst = 1 << 10;
  // The lower half of a range is for messages, the upper one for second parts.
  static constexpr int kFirstOfSecondParts = kInRange / 2;
  static constexpr int kPositions = kFirstOfSecondParts / wire::kSizeClasses;

  int first_;
};

}  // namespace plumb
