// Handles signals while something is to be saved.
#pragma once

namespace plumb::cli {

// While one lives, the first SIGINT is kept instead of ending the process; with `others` SIGTERM, SIGHUP and SIGUSR1
// are, too. SIGQUIT ends it always.
class KeptSignal {
 public:
  explicit KeptSignal(bool others);
  ~KeptSignal();
  KeptSignal(const KeptSignal&) = delete;

  int taken() const;  // 0: none
  // Returns a signal that only this process got and its child processes need; 0 for a terminal's, which goes to all of
  // them. Returned once.
  int to_pass_on() const;
};

// Notes that another process has saved something.
void note_saved() noexcept;
// Notes that no option saves this training's weights: tables and the like that it writes are not what it learned.
void note_nothing_to_save() noexcept;
// Returns whether this process or another saved anything. Safe in a signal handler.
bool anything_saved() noexcept;
// Returns the end of a sentence about a failed command: "" or ", nothing was saved". Safe in a signal handler.
const char* what_was_saved() noexcept;

// Ends the process by this signal, as the shell expects of an interrupted program.
[[noreturn]] void end_by_signal(int signal);

// Called by the handler. Returns whether the signal was kept; false for the second from the same side, launcher or
// other.
bool take_signal(int signal, bool from_a_process, bool from_launcher) noexcept;

}  // namespace plumb::cli
