// Starts the local processes of a pipeline, looks after them, and makes up for lost ones.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace plumb {

struct ProcessEnd {
  int exit_code = 0;  // 0 for success; 128 + signal for one that was killed
  int signal = 0;     // the signal that ended it, or 0
  bool stopped_by_launcher = false;
  bool was_stopped = false;  // by a signal, until the launcher lost its patience
  bool was_silent = false;   // did not leave a generation that had failed, until the launcher lost its patience
  double seconds = 0;        // from start to end
};

struct LaunchOptions {
  int num_processes = 1;
  // The program and its arguments; empty program: this very program (its arguments are the caller's to give).
  std::string program;
  std::vector<std::string> arguments;
  std::vector<std::pair<std::string, std::string>> environment;  // added to this process's own
  // Takes every line a process prints (without the line break); none: stdout and stderr go where this process's go,
  // with "[rank 1] " in front of the lines of stderr. The rank of a spare is -1.
  std::function<void(int rank, bool is_stderr, const std::string& line)> on_line;
  // After the first process that failed, the others have this long to end by themselves (and print why).
  std::chrono::milliseconds patience = std::chrono::seconds(5);
  // Called between lines; true ends everything (a canceled job).
  std::function<bool()> cancelled;
  // Called between lines; returns a signal for every process, 0 for none.
  std::function<int()> signal;
  // A process that is stopped (SIGSTOP) for this long has failed.
  std::chrono::milliseconds patience_with_stopped = std::chrono::minutes(1);

  // --- going on without a lost process (generations.h) ---
  // Number of lost processes that are made up for; after that, and with 0, the others are ended. The processes must ask
  // for their Membership.
  int replacements = 0;
  // Number of further processes that are started and wait to take a lost one's place.
  int spares = 0;
  // Returns how many of the `left` processes are to go on when there is no spare; 0: a new one is started. None: a new
  // one.
  std::function<int(int left)> fewer;
  // A process that does not leave a generation that has failed has failed after this. It is made up for as a part of
  // that failure.
  // The first generation begins after this at the latest, even without some of its processes.
  std::chrono::milliseconds patience_with_silent = std::chrono::minutes(1);
  // Called for every lost process: its rank, its end, and a sentence about what is done.
  std::function<void(int rank, const ProcessEnd& end, const std::string& instead)> on_lost;
};

struct LaunchResult {
  std::vector<ProcessEnd> processes;  // by rank; of those that had it last
  int first_failed = -1;              // the rank that failed first, of several one that a signal ended; -1: none
  // Returns the exit code for the launching program: 0, or the first failed process's code.
  int exit_code() const { return first_failed < 0 ? 0 : processes[first_failed].exit_code; }
};

// Runs `num_processes` copies with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT set (a free
// port of loopback, held from the start; with replacements PLUMB_PROCESS, too), and PLUMB_RUN, a random number that all
// processes of one launch have in common, and waits for all of them. Children do not outlive this process. Throws
// Error(ExecutionFailed) if the program cannot be started.
LaunchResult launch_local(const LaunchOptions& options);

}  // namespace plumb
