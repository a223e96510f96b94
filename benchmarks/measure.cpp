#include "benchmarks/measure.h"

#include <ctime>
#include <optional>

#include "plumb/autograd/recompute/live_bytes.h"

namespace {

std::optional<plumb::LiveBytes> counting;

}  // namespace

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

void count_allocations() { counting.emplace(); }

int64_t live_allocations() {
  counting->restart_peak();
  return counting->live();
}

int64_t peak_of_allocations() {
  const int64_t peak = counting->peak();
  counting.reset();
  return peak;
}
