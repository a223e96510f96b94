// ask NAME ARGUMENTS...: runs the command (loaded.cpp) or Python (loaded.py) with these arguments in a fork of the
// process that listens under this name, with this process's streams, folder and environment, and ends as the fork does.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdio>

#include "tests/command/request.h"

int main(int, char** arguments) {
  const sockaddr_un address = command_testing::address_of(arguments[1]);
  const int connection = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  command_testing::Request request{::getpid(), {0, 1, 2, ::open(".", O_RDONLY | O_DIRECTORY)}};
  int status = 0;
  if (::connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      !command_testing::exchange(connection, request, true) ||
      ::read(connection, &status, sizeof status) != sizeof status) {
    std::perror("ask");
    return 127;
  }
  if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
  ::signal(WTERMSIG(status), SIG_DFL);
  ::raise(WTERMSIG(status));
}
