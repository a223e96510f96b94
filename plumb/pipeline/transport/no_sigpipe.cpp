#include "plumb/pipeline/transport/no_sigpipe.h"

#include <cerrno>
#include <ctime>

namespace plumb {
namespace {

sigset_t only_sigpipe() {
  sigset_t only;
  ::sigemptyset(&only);
  ::sigaddset(&only, SIGPIPE);
  return only;
}

bool is_pending() {
  sigset_t pending;
  return ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

NoSigpipe::NoSigpipe() noexcept {
  const sigset_t only = only_sigpipe();
  was_pending_ = is_pending();
  ::pthread_sigmask(SIG_BLOCK, &only, &before_);
}

NoSigpipe::~NoSigpipe() {
  const int error = errno;
  const sigset_t only = only_sigpipe();
  const timespec none{};
  if (!was_pending_ && is_pending()) {
    while (::sigtimedwait(&only, nullptr, &none) < 0 && errno == EINTR) {
    }
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

}  // namespace plumb
