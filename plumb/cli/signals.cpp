#include "plumb/cli/signals.h"

#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <iostream>

namespace plumb::cli {
namespace {

std::atomic<bool> keeping = false, keeping_others = false;
std::atomic<int> kept = 0, to_pass = 0;

}  // namespace

KeptSignal::KeptSignal(bool others) {
  kept = to_pass = 0;
  keeping_others = others;
  keeping = true;
}
KeptSignal::~KeptSignal() { keeping = false; }
int KeptSignal::taken() const { return kept; }
int KeptSignal::to_pass_on() const { return to_pass.exchange(0); }

void end_by_signal(int signal) {
  std::cout.flush();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
  std::abort();  // not reached
}

bool take_signal(int signal, bool from_a_process) noexcept {
  int none = 0;
  if (!keeping || (signal != SIGINT && !keeping_others) || !kept.compare_exchange_strong(none, signal)) return false;
  if (from_a_process) to_pass = signal;
  return true;
}

}  // namespace plumb::cli
