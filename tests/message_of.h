// What a call that must fail says.
#pragma once

#include <string>

#include "plumb/core/error.h"

namespace plumb {

// The text of the Error that call() throws, or "no error".
template <typename F>
std::string message_of(const F& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace plumb
