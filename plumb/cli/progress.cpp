#include "plumb/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace plumb::cli {
namespace {

constexpr double kLong = 2;  // seconds
constexpr const char* kErase = "\r\x1b[K";

}  // namespace

std::string bar_text(int done, int total) {
  constexpr int kWidth = 30;
  const int full = static_cast<int>(int64_t{kWidth} * std::min(done, total) / std::max(total, 1));
  return "[" + std::string(full, '#') + std::string(kWidth - full, ' ') + "] " + std::to_string(done) + "/" +
         std::to_string(total);
}

Progress::Progress(int parts, bool quiet)
    : parts_(parts), quiet_(quiet), bar_(!quiet && ::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { finish(); }

void Progress::finish() {
  if (what_.empty() || quiet_) return;
  if (bar_) {
    std::fputs(kErase, stderr);
  } else if (const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count();
             seconds >= kLong) {
    std::fprintf(stderr, "%s: %.1f s\n", what_.c_str(), seconds);
  }
  std::fflush(stderr);
  what_.clear();
}

void Progress::next(const std::string& what) {
  finish();
  what_ = what;
  since_ = std::chrono::steady_clock::now();
  if (bar_) std::fprintf(stderr, "%s%s  %s", kErase, bar_text(begun_, parts_).c_str(), what.c_str());
  std::fflush(stderr);
  ++begun_;
}

void Progress::say(const std::string& line) {
  if (quiet_) return;
  std::fprintf(stderr, "%s%s\n", bar_ ? kErase : "", line.c_str());
  if (bar_ && !what_.empty()) std::fprintf(stderr, "%s  %s", bar_text(begun_ - 1, parts_).c_str(), what_.c_str());
  std::fflush(stderr);
}

}  // namespace plumb::cli
