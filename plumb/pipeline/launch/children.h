// Processes that this one has started: what they print, and how they end.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/pipeline/launch/descriptor.h"
#include "plumb/pipeline/launch/launch.h"

namespace plumb {

// Numbered from 0 as they are started. None outlives this object, nor this process.
class Children {
 public:
  using Clock = std::chrono::steady_clock;
  using Line = std::function<void(int child, bool is_stderr, const std::string& line)>;

  struct Child {
    pid_t pid = -1;
    bool ended = false;
    bool told_to_stop = false;
    Clock::time_point stopped{};  // by a signal since then, if it is
    ProcessEnd end;               // once it has ended

    bool failed() const { return ended && end.exit_code != 0; }

   private:
    friend class Children;
    struct Output {
      Descriptor fd;
      std::string rest;
    };
    Output out, err;
    Clock::time_point started;
  };

  // `on_line` takes every line. A child that is stopped for as long as `patience_with_stopped` is killed.
  Children(Line on_line, std::chrono::milliseconds patience_with_stopped)
      : on_line_(std::move(on_line)), patience_(patience_with_stopped) {}
  ~Children();
  Children(const Children&) = delete;

  // `variables`: on top of this process's own. `inherits`: a descriptor that the child keeps open; -1: none. Throws
  // Error(ExecutionFailed) if the program cannot be started.
  int start(const std::string& program, const std::vector<std::string>& arguments,
            const std::vector<std::pair<std::string, std::string>>& variables, int inherits = -1);

  int count() const { return static_cast<int>(children_.size()); }
  const Child& operator[](int child) const { return children_.at(child); }
  bool all_ended() const;
  // Sends a signal to a living child; `stops` if that is to end it.
  void signal(int child, int signal, bool stops);

  // Kills a living child that should have done something.
  void kill_silent(int child);

  // Passes lines on for `wait` as they come, then looks for children that have ended, stopped or gone on.
  void watch(std::chrono::milliseconds wait);
  // Reads the rest out of the pipes when all have ended.
  void read_to_the_end() { read_lines(std::chrono::milliseconds(50), /*to_the_end=*/true); }

 private:
  bool drain(int child, Child::Output& output, bool is_stderr);
  void read_lines(std::chrono::milliseconds wait, bool to_the_end);
  void reap(int child);

  Line on_line_;
  std::chrono::milliseconds patience_;
  std::vector<Child> children_;
};

}  // namespace plumb
