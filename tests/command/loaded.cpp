// Preloaded into the command, this runs its main() in a fork for every request: libtorch, whose operators register
// themselves for 0.2 s in every process, is loaded once. It is the very program otherwise: /proc/self/exe names it.
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <fstream>
#include <vector>

#include "tests/command/request.h"

namespace {

using Main = int(int, char**, char**);
Main* command;

struct Texts {
  explicit Texts(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    for (std::string text; std::getline(file, text, '\0');) texts.push_back(text);
  }
  char** pointers() {
    for (std::string& text : texts) places.push_back(text.data());
    places.push_back(nullptr);
    return places.data();
  }
  std::vector<std::string> texts;
  std::vector<char*> places;
};

// Runs the command in a child, and says how it ended.
[[noreturn]] void run(int connection, const char* program) {
  ::signal(SIGCHLD, SIG_DFL);
  command_testing::Request request;
  if (!command_testing::exchange(connection, request, false)) ::_exit(127);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string process = "/proc/" + std::to_string(request.process);
    Texts arguments(process + "/cmdline"), environment(process + "/environ");
    arguments.texts.erase(arguments.texts.begin());
    arguments.texts.at(0) = program;
    if (::fchdir(request.files[3]) != 0) ::_exit(127);
    for (int stream = 0; stream < 3; ++stream) ::dup2(request.files[stream], stream);
    for (const int file : request.files) ::close(file);
    ::close(connection);
    environ = environment.pointers();
    ::exit(command(static_cast<int>(arguments.texts.size()), arguments.pointers(), environ));
  }
  // A pipe's reader waits for the last one that could write.
  for (const int file : request.files) ::close(file);
  for (int stream = 0; stream < 3; ++stream) ::close(stream);
  int status = 127 << 8;
  if (child > 0) ::waitpid(child, &status, 0);
  [[maybe_unused]] const auto written = ::write(connection, &status, sizeof status);
  ::_exit(0);
}

int serve(int, char** arguments, char**) {
  const int listening = std::atoi(::getenv("PLUMB_COMMANDS_FROM"));
  ::signal(SIGCHLD, SIG_IGN);  // nobody waits for the processes that wait for commands
  while (true) {
    const int connection = ::accept(listening, nullptr, nullptr);
    if (connection < 0) return 1;
    if (::fork() == 0) {
      ::close(listening);
      run(connection, arguments[0]);
    }
    ::close(connection);
  }
}

}  // namespace

extern "C" int __libc_start_main(Main* main, int argc, char** argv, void (*init)(), void (*fini)(), void (*at_end)(),
                                 void* stack) {
  command = main;
  const auto start = reinterpret_cast<decltype(&__libc_start_main)>(::dlsym(RTLD_NEXT, "__libc_start_main"));
  return start(&serve, argc, argv, init, fini, at_end, stack);
}
