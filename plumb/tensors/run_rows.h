// The rows of a batch that run on this thread.
#pragma once

#include <cstdint>
#include <optional>

namespace plumb {

struct RunRows {
  std::int64_t first = 0;  // the number of the first one, or of the microbatch where `count` is 0
  std::int64_t count = 0;  // 0: not known
};

// While it lives, these rows run on this thread. They may be inside of others.
class RunningRows {
 public:
  explicit RunningRows(const RunRows& rows);
  ~RunningRows();
  RunningRows(const RunningRows&) = delete;
  RunningRows& operator=(const RunningRows&) = delete;

 private:
  std::optional<RunRows> before_;
};

// Returns those of this thread's innermost RunningRows; nullopt without one.
std::optional<RunRows> running_rows();

}  // namespace plumb
