// Counts the bytes of tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace plumb {

// Counts, while it lives, every byte that torch's allocators, the CPU's and those of devices, give out and take back on
// this thread and in the backwards that it starts. Inside of torch's profiler, only this counter counts.
class LiveBytes {
 public:
  LiveBytes() : count_(std::make_shared<Count>()), guard_(c10::DebugInfoKind::PROFILER_STATE, count_) {}

  int64_t live() const { return count_->live; }  // bytes given out less those taken back; may be negative
  int64_t peak() const { return count_->peak; }  // highest live() since construction or restart_peak()
  void restart_peak() { count_->peak = count_->live.load(); }

 private:
  struct Count : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
      const int64_t now = live += size;
      int64_t most = peak;
      while (most < now && !peak.compare_exchange_weak(most, now)) {
      }
    }
    void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
    std::atomic<int64_t> live = 0, peak = 0;  // a device's backward runs in threads of the device's
  };
  const std::shared_ptr<Count> count_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace plumb
