// Checks of values that a device holds. The host does not wait for each: they are noted while the device works and
// read together at the end of what they belong to, a run of a graph or a step of a pipeline.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "plumb/core/error.h"

namespace plumb {

// Keeps the checks of its thread while it lives; checks inside of an inner scope go to that one.
class DeferredChecks {
 public:
  DeferredChecks();
  ~DeferredChecks();
  DeferredChecks(const DeferredChecks&) = delete;

  // Returns whether the thread has such a scope.
  static bool active();
  // Waits for the devices of what was noted, once each, forgets it and throws the error of the first check that
  // failed, in the order in which they were made, with `at` before its message.
  void raise(const std::string& at = "");
  // As raise(), after `thrown`, which says that the device cannot go on: errors after a failed check say little.
  // Returns if no check failed or the device does not respond any more.
  void raise_before(const Error& thrown, const std::string& at = "");

 private:
  friend void check_value(const at::Tensor& passed, std::function<Error()> failure);
  struct Check {
    at::Tensor passed;
    std::function<Error()> failure;
  };
  std::vector<Check> checks_;
  DeferredChecks* const outer_;
};

// passed: bool [], on any device. If it is false, throws what `failure` makes: at once on the CPU and where there is no
// scope, else by raise(). What `failure` reads must keep its values until then.
void check_value(const at::Tensor& passed, std::function<Error()> failure);

// Returns the result of `run`, after the checks that it made have passed.
template <class Run>
auto with_deferred_checks(const std::string& at, const Run& run) {
  DeferredChecks checks;
  try {
    auto result = run();
    checks.raise(at);
    return result;
  } catch (const Error& e) {
    checks.raise_before(e, at);
    throw;
  }
}

}  // namespace plumb
