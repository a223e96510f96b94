#include "benchmarks/measure.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <ctime>
#include <memory>

namespace {

class Allocations : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    live_ += size;
    peak_ = std::max(peak_, live_);
  }
  void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }

 private:
  int64_t live_ = 0, peak_ = 0;
};

std::shared_ptr<Allocations> counting;

}  // namespace

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

void count_allocations() {
  counting = std::make_shared<Allocations>();
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, counting);
}

int64_t peak_of_allocations() {
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  return counting->peak();
}
