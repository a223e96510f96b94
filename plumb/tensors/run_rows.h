// The rows of a batch that run on this thread.
#pragma once

#include <cstdint>
#include <optional>

namespace plumb {

struct RunRows {
  std::int64_t first = 0;  // the number of the first one, or of the microbatch where `count` is 0
  std::int64_t count = 0;  // 0: not known
};

// Returns those of this thread's NodeSeeds (node_seeds.h); nullopt without one.
std::optional<RunRows> running_rows();

}  // namespace plumb
