// A request to run the command or Python: the number of the process that asks, whose arguments and environment are
// taken, with its standard streams and its folder.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace command_testing {

struct Request {
  pid_t process = 0;
  int files[4] = {};  // stdin, stdout, stderr, the folder
};

// Returns the address of the process that listens under a name, which is no file's.
inline sockaddr_un address_of(const std::string& listener) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "plumb_commands_" + listener;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return address;
}

// Sends a request with a copy of its descriptors, or takes one: true if that went well.
inline bool exchange(int connection, Request& request, bool sends) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof request.files)] = {};
  iovec process{&request.process, sizeof request.process};
  msghdr message{};
  message.msg_iov = &process;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* files = CMSG_FIRSTHDR(&message);
  if (sends) {
    files->cmsg_level = SOL_SOCKET;
    files->cmsg_type = SCM_RIGHTS;
    files->cmsg_len = CMSG_LEN(sizeof request.files);
    std::memcpy(CMSG_DATA(files), request.files, sizeof request.files);
    return ::sendmsg(connection, &message, 0) == sizeof request.process;
  }
  if (::recvmsg(connection, &message, 0) != sizeof request.process || message.msg_controllen < sizeof control)
    return false;
  std::memcpy(request.files, CMSG_DATA(files), sizeof request.files);
  return true;
}

}  // namespace command_testing
