// A peer that is gone is an error of the message and never a signal, whatever the program does with signals.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/pipeline/transport/no_sigpipe.h"
#include "plumb/pipeline/transport/transport.h"
#include "torch/torch.h"

namespace plumb {
namespace {

using namespace testing_processes;

// Writes to a socket nobody reads from. Returns the errno of the write.
int write_to_nobody() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ::close(ends[1]);
  const char byte = 1;
  const int error = ::write(ends[0], &byte, 1) < 0 ? errno : 0;
  ::close(ends[0]);
  return error;
}

bool pending() {
  sigset_t all;
  return ::sigpending(&all) == 0 && ::sigismember(&all, SIGPIPE) == 1;
}

bool blocked_here() {
  sigset_t mask;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return ::sigismember(&mask, SIGPIPE) == 1;
}

std::set<std::string> threads() {
  std::set<std::string> found;
  DIR* folder = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] != '.') found.insert(entry->d_name);
  }
  ::closedir(folder);
  return found;
}

bool blocks_sigpipe(const std::string& thread) {
  std::ifstream status("/proc/self/task/" + thread + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("SigBlk:", 0) == 0) return std::strtoull(line.c_str() + 7, nullptr, 16) >> (SIGPIPE - 1) & 1;
  }
  return true;  // it has ended
}

TEST(NoSigpipe, AWriteToNobodyIsAnErrorAndTheMaskIsWhatItWas) {
  const auto before = ::signal(SIGPIPE, SIG_DFL);  // a signal would end this test
  {
    const NoSigpipe guard;
    EXPECT_EQ(write_to_nobody(), EPIPE);
    const NoSigpipe nested;
    EXPECT_EQ(write_to_nobody(), EPIPE);
  }
  EXPECT_FALSE(pending());
  EXPECT_FALSE(blocked_here());
  ::signal(SIGPIPE, before);
}

TEST(NoSigpipe, ASignalThatTheProgramHasBlockedStaysPending) {
  sigset_t only;
  ::sigemptyset(&only);
  ::sigaddset(&only, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &only, nullptr);
  {
    const NoSigpipe guard;
    EXPECT_EQ(write_to_nobody(), EPIPE);
  }
  EXPECT_FALSE(pending());
  write_to_nobody();
  {
    const NoSigpipe guard;
    EXPECT_EQ(write_to_nobody(), EPIPE);
  }
  EXPECT_TRUE(pending());
  EXPECT_TRUE(blocked_here());
  const timespec none{};
  ::sigtimedwait(&only, nullptr, &none);
  ::pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
}

// Rank 1 is killed while rank 0 sends to it as fast as it can; a SIGPIPE would end rank 0 with exit code 9.
Role sending_role("sending to the lost", [] {
  ::signal(SIGPIPE, [](int) { ::_exit(9); });
  const auto before = threads();
  ProcessGroup world = make_group_from_environment();
  // Once in some hundred times a send of Gloo's misses that its peer is gone, and waits for the time-out.
  world.set_timeout(std::chrono::seconds(8));
  std::set<std::string> open;
  // The thread that met the others may still be ending.
  for (int look = 0; look < 3000 && (look == 0 || !open.empty()); ++look) {
    if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    open.clear();
    for (const std::string& thread : threads()) {
      if (!before.contains(thread) && !blocks_sigpipe(thread)) open.insert(thread);
    }
  }
  if (!open.empty()) report("open", *open.begin());
  if (blocked_here()) report("blocked", "the thread that made the group");
  broadcast(world, at::zeros({1}), 0);  // rank 1 is not lost before rank 0 is there
  std::thread end;
  if (world.rank() == 1) {
    end = std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(number_setting("AFTER", 0)));
      ::raise(SIGKILL);
    });
  }
  try {
    at::Tensor values = at::zeros({1000});
    while (true) {
      broadcast(world, values, 0);
      Transport(world).exchange(std::string(5000, 'x'));
    }
  } catch (const Error& e) {
    return e.kind() == ErrorKind::Communication ? 4 : 5;
  }
});

TEST(NoSigpipe, ARankWhosePeerDiesGetsAnErrorWhateverItDoesWithTheSignal) {
  for (const int after : {0, 7, 23, 41}) {
    const auto run = run_role("sending to the lost", 2, {{"AFTER", std::to_string(after)}});
    EXPECT_EQ(run.result.processes[0].exit_code, 4) << after << run.errors[0];
    EXPECT_FALSE(run.reports[0].contains("open")) << "a thread of Gloo's or of the store's takes the signal";
    EXPECT_FALSE(run.reports[0].contains("blocked"));
  }
}

}  // namespace
}  // namespace plumb
