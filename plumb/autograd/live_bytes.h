// Counts the bytes of tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace plumb {

// Counts, while it lives, every byte that torch's CPU allocator gives out and takes back on this thread. A CPU backward
// runs on its caller's thread. Inside of torch's profiler, this counter counts and the profiler does not.
class LiveBytes {
 public:
  LiveBytes() : count_(std::make_shared<Count>()), guard_(c10::DebugInfoKind::PROFILER_STATE, count_) {}

  int64_t live() const { return count_->live; }  // of those handed out since it was made; may be negative
  int64_t peak() const { return count_->peak; }  // the most since it was made or told to restart
  void restart_peak() { count_->peak = count_->live; }

 private:
  struct Count : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
      live += size;
      peak = std::max(peak, live);
    }
    void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
    int64_t live = 0, peak = 0;
  };
  const std::shared_ptr<Count> count_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace plumb
