#include "plumb/pipeline/launch/keeper.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "plumb/core/error.h"

namespace plumb {
namespace {

// Runs `work` in a child of this process. Returns its exit code; 99 for an error.
int in_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = work();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

SharedMemory memory_of(const char* text) {
  SharedMemory memory;
  std::strcpy(memory.grow(64), text);
  return memory;
}

std::string text_of(const SharedMemory& memory) { return static_cast<const char*>(memory.bytes().const_data_ptr()); }

// A launcher that starts a rank, loses it and starts another.
TEST(KeeperOfAHost, HasTheMemoryOfRanksThatAreGone) {
  const int code = in_child([] {
    const pid_t launcher = ::getpid();
    const int killed = in_child([launcher] {
      Keeper keeper(launcher);
      if (!keeper.memory().empty()) return 1;
      keeper.keep(memory_of("first"));
      keeper.keep(memory_of("second"));
      ::raise(SIGKILL);
      return 2;
    });
    if (killed != 128 + SIGKILL) return 3;
    const int second = in_child([launcher] {
      Keeper keeper(launcher);
      const auto before = keeper.memory();
      if (before.size() != 2 || text_of(before[0]) != "first" || text_of(before[1]) != "second") return 4;
      keeper.keep(memory_of("third"));
      keeper.drop_old();
      return text_of(before[0]) == "first" ? 0 : 5;  // this process still holds it
    });
    if (second != 0) return second;
    return in_child([launcher] {
      const auto left = Keeper(launcher).memory();
      return left.size() == 1 && text_of(left[0]) == "third" ? 0 : 6;
    });
  });
  EXPECT_EQ(code, 0);
}

TEST(KeeperOfAHost, EndsWithItsLauncher) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(in_child([&] {
              const pid_t launcher = ::getpid();
              if (::write(ends[1], &launcher, sizeof launcher) != sizeof launcher) return 1;
              return in_child([&] {
                Keeper(launcher).keep(memory_of("kept"));
                return 0;
              });
            }),
            0);
  pid_t launcher = 0;
  ASSERT_EQ(::read(ends[0], &launcher, sizeof launcher), static_cast<ssize_t>(sizeof launcher));
  ::close(ends[0]);
  ::close(ends[1]);
  // Nobody is there for this launcher any more, and none can be started.
  std::string problem;
  for (int tries = 0; tries < 1000 && problem.empty(); ++tries) {
    try {
      const Keeper keeper(launcher);
    } catch (const Error& e) {
      problem = e.what();
    }
    ::usleep(10000);
  }
  EXPECT_NE(problem.find("the launcher cannot be watched"), std::string::npos) << problem;
}

}  // namespace
}  // namespace plumb
