#include "plumb/capture/capture_mode.h"

namespace plumb {

CaptureMode first_mode(const AllowedModes& allowed, bool guard_values) {
  return {.skip_compute = allowed.skip_compute,
          .tell_libraries = guard_values && allowed.guarded_tells_libraries,
          .guard_values = guard_values};
}

std::optional<CaptureMode> next_mode(const CaptureMode& mode, RetryReason reason, const AllowedModes& allowed) {
  CaptureMode next = mode;
  switch (reason) {
    case RetryReason::NeedsComposites: next.open_composites = true; break;
    case RetryReason::NeedsValues: next.skip_compute = false; break;
    case RetryReason::LibraryBranches:
      if (allowed.tell_libraries && !mode.tell_libraries && !mode.guard_values) {
        next = first_mode(allowed, false);
        next.tell_libraries = true;
        break;
      }
      [[fallthrough]];
    case RetryReason::DataDependent:
      if (allowed.guard_values && !mode.guard_values) next = first_mode(allowed, true);
      break;
  }
  if (next == mode) return std::nullopt;
  return next;
}

}  // namespace plumb
