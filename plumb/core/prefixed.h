// Errors that say what they are about.
#pragma once

#include <string>

#include "plumb/core/error.h"

namespace plumb {

// Runs `run`; its errors begin with `prefix` then ("--at: "). Without a prefix they stay what they are.
template <class Function>
auto prefixed(const std::string& prefix, const Function& run) {
  try {
    return run();
  } catch (const Error& e) {
    if (prefix.empty()) throw;
    throw Error(e.kind(), prefix + e.message(), e.where(), e.remedy());
  }
}

}  // namespace plumb
