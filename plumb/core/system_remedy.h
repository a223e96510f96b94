// Remedies for errors of the operating system.
#pragma once

#include <cerrno>
#include <string>

namespace plumb {

// Returns the remedy for a reason that has nothing to do with the path or port, else `otherwise`. `reason`: an errno.
inline std::string system_remedy(int reason, const std::string& otherwise) {
  switch (reason) {
    case EMFILE: return "close files, or raise the limit of open ones (ulimit -n)";
    case ENFILE: return "the whole system has too many files open: end other programs";
    case ENOMEM:
    case EAGAIN: return "end other programs, or raise the limits of memory and processes (ulimit -v, ulimit -u)";
    default: return otherwise;
  }
}

}  // namespace plumb
