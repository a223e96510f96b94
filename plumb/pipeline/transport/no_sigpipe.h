// Writes to sockets whose other end is gone.
#pragma once

#include <signal.h>

namespace plumb {

// While one lives, a write of this thread to a socket or pipe without a reader fails with EPIPE and raises no signal:
// SIGPIPE is blocked in this thread, and one that came meanwhile is taken away before the mask is restored. Threads
// that are started meanwhile inherit the mask, and never get the signal. Handlers and dispositions of the program stay
// untouched. Gloo writes to sockets without MSG_NOSIGNAL, in its own threads and in those that send, so all code that
// makes or uses one of its groups holds one of these.
class NoSigpipe {
 public:
  NoSigpipe() noexcept;
  ~NoSigpipe();
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t before_;
  bool was_pending_ = false;  // a SIGPIPE that the program itself has blocked stays pending
};

}  // namespace plumb
