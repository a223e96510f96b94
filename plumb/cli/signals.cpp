#include "plumb/cli/signals.h"

#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <iostream>

#include "plumb/core/output_file.h"

namespace plumb::cli {
namespace {

std::atomic<bool> keeping = false, keeping_others = false, saved = false, only_tables = false;
std::atomic<int> kept = 0, to_pass = 0;
// A signal to a whole group of processes comes to a rank twice: as itself, and passed on by its launcher.
std::atomic<bool> seen[2];

}  // namespace

KeptSignal::KeptSignal(bool others) {
  kept = to_pass = 0;
  seen[0] = seen[1] = false;
  keeping_others = others;
  keeping = true;
}
KeptSignal::~KeptSignal() { keeping = false; }
int KeptSignal::taken() const { return kept; }
int KeptSignal::to_pass_on() const { return to_pass.exchange(0); }

void note_saved() noexcept { saved = true; }
void note_nothing_to_save() noexcept { only_tables = true; }
bool anything_saved() noexcept { return saved || (!only_tables && was_any_file_written()); }
const char* what_was_saved() noexcept {
  if (only_tables) return ", the trained weights were not saved";
  return anything_saved() ? "" : ", nothing was saved";
}

void end_by_signal(int signal) {
  std::cout.flush();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
  std::abort();  // not reached
}

bool take_signal(int signal, bool from_a_process, bool from_launcher) noexcept {
  if (!keeping || signal == SIGQUIT || (signal != SIGINT && !keeping_others)) return false;
  if (seen[from_launcher].exchange(true)) return false;
  int none = 0;
  if (kept.compare_exchange_strong(none, signal) && from_a_process) to_pass = signal;
  return true;
}

}  // namespace plumb::cli
