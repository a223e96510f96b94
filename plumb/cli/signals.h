// Signals while something is to be saved.
#pragma once

namespace plumb::cli {

// While one lives, the first SIGINT is kept instead of ending the process; with `others` SIGTERM and SIGHUP are, too.
class KeptSignal {
 public:
  explicit KeptSignal(bool others);
  ~KeptSignal();
  KeptSignal(const KeptSignal&) = delete;

  int taken() const;  // 0: none
  // A signal that only this process got, for its processes: a terminal's goes to all of them. Answered once.
  int to_pass_on() const;
};

// As the shell expects it of who was interrupted.
[[noreturn]] void end_by_signal(int signal);

// For the handler: whether the signal was kept.
bool take_signal(int signal, bool from_a_process) noexcept;

}  // namespace plumb::cli
