// The ways in which a forward can be watched, and when a capture goes from one to the next.
#pragma once

#include <optional>
#include <stdexcept>

namespace plumb {

// How one attempt to capture works. A capture begins with the cheapest mode. A forward that does not fit it gives a
// reason, and the capture is repeated in the mode that next_mode() returns.
struct CaptureMode {
  // Large products are not computed: zeros take the place of their results. No value is then what it will be.
  bool skip_compute = true;
  // Composite operators are recorded as the operators that they are made of.
  bool open_composites = false;
  // Libraries that have another way for graph makers (torch.compiler.is_compiling()) take it.
  bool tell_libraries = false;
  // Values that the program takes out of tensors are guarded by nodes instead of refused.
  bool guard_values = false;

  bool operator==(const CaptureMode&) const = default;
};

enum class RetryReason {
  NeedsValues,      // the forward asks for values, or fails on zeros, while computation is skipped
  NeedsComposites,  // a backward pass runs inside the forward: it works on what composite operators are made of
  LibraryBranches,  // a library that has another way for graph makers did something that a graph cannot hold
  LibraryFails,     // the forward fails on the way that a library takes for graph makers
  DataDependent,    // the forward takes values out of tensors
};

// One attempt at a capture: the mode it runs in, and why it has to be given up.
struct Attempt {
  // Thrown to leave the forward; what counts is `retry`, as the program may catch it.
  struct GivenUp : std::runtime_error {
    GivenUp() : std::runtime_error("the capture begins again in another mode") {}
  };

  CaptureMode mode;
  bool skipped = false;  // some computation was skipped: values depend on zeros
  std::optional<RetryReason> retry;

  [[noreturn]] void give_up(RetryReason reason) {
    retry = reason;
    throw GivenUp();
  }
  // Called before a value is read.
  void need_values() {
    if (skipped) give_up(RetryReason::NeedsValues);
  }
};

// The modes that the caller allows.
struct AllowedModes {
  bool skip_compute = true;
  bool tell_libraries = false;
  bool guard_values = false;
  bool guarded_tells_libraries = false;  // guarding values tells libraries, too
};

// Returns the mode to begin with. `guard_values`: a mode that guards values at once.
CaptureMode first_mode(const AllowedModes& allowed, bool guard_values);
// Returns the mode to try after `mode` failed for this reason; nullopt if there is none left: the failure is final.
std::optional<CaptureMode> next_mode(const CaptureMode& mode, RetryReason reason, const AllowedModes& allowed);

}  // namespace plumb
