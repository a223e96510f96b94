// One attempt at a capture: the mode it runs in, and why it has to be given up.
#pragma once

#include <optional>
#include <stdexcept>

#include "plumb/capture/capture_mode.h"

namespace plumb {

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
  // Before a value is read.
  void need_values() {
    if (skipped) give_up(RetryReason::NeedsValues);
  }
};

}  // namespace plumb
