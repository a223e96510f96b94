// Progress of a command on stderr: a bar on a terminal; elsewhere a plain line for each part that took long.
#pragma once

#include <chrono>
#include <string>

namespace plumb::cli {

// "[#####     ] 3/6"
std::string bar_text(int done, int total);

class Progress {
 public:
  // `parts`: how often next() will be called. Quiet: says nothing (--json).
  explicit Progress(int parts, bool quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Ends the last part and begins `what` ("reading model.pt2").
  void next(const std::string& what);
  // Prints a line of its own on stderr; the bar goes on below it.
  void say(const std::string& line);
  // Ends the last part, before results are printed.
  void finish();

 private:
  const int parts_;
  const bool quiet_, bar_;
  int begun_ = 0;
  std::string what_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace plumb::cli
