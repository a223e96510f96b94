// The message of a call that must fail, and the error itself.
#pragma once

#include <gtest/gtest.h>

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

// The Error that call() throws; a failure of the test if there is none.
template <typename F>
Error error_of(const F& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorKind::Internal, "no error");
}

}  // namespace plumb
