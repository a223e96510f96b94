#include "plumb/pipeline/transport/listen.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/core/system_remedy.h"

namespace plumb {

int listen_at(const std::string& address, int& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = address == "localhost" ? 0 : AI_NUMERICHOST;
  if (::getaddrinfo(address.c_str(), nullptr, &hints, &found) != 0) return -1;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  int reason = EADDRNOTAVAIL;
  for (const addrinfo* each = found; each; each = each->ai_next) {
    const int fd = ::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      reason = errno;
      continue;
    }
    sockaddr_storage bound{};
    std::memcpy(&bound, each->ai_addr, each->ai_addrlen);
    socklen_t length = each->ai_addrlen;
    auto* generic = reinterpret_cast<sockaddr*>(&bound);
    in_port_t& number = each->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                    : reinterpret_cast<sockaddr_in*>(&bound)->sin_port;
    number = htons(static_cast<uint16_t>(port));
    const int yes = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(fd, generic, length) == 0 && ::listen(fd, 1024) == 0 && ::getsockname(fd, generic, &length) == 0) {
      port = ntohs(number);
      return fd;
    }
    reason = errno;
    ::close(fd);
  }
  if (reason == EADDRNOTAVAIL) return -1;
  throw Error(ErrorKind::Communication, str("cannot listen at ", address, ":", port, ": ", std::strerror(reason)), "",
              system_remedy(reason, "choose another port"));
}

void wait_for_host(const std::string& what, const std::string& name, std::chrono::milliseconds timeout) {
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (true) {
    addrinfo* found = nullptr;
    const int problem = ::getaddrinfo(name.c_str(), nullptr, nullptr, &found);
    if (problem == 0) return ::freeaddrinfo(found);
    if (std::chrono::steady_clock::now() >= until) {
      throw Error(ErrorKind::Communication, str(what, ": no host has the name '", name, "': ", ::gai_strerror(problem)),
                  "", "check MASTER_ADDR: the name or address of rank 0's host, as this host knows it");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

std::string address_towards(const std::string& other) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (::getaddrinfo(other.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  for (const addrinfo* each = found; each; each = each->ai_next) {
    const int fd = ::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    auto* generic = reinterpret_cast<sockaddr*>(&own);
    char text[NI_MAXHOST] = "";
    const bool known = ::connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
                       ::getsockname(fd, generic, &length) == 0 &&
                       ::getnameinfo(generic, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0;
    ::close(fd);
    if (known) return text;
  }
  return "";
}

}  // namespace plumb
