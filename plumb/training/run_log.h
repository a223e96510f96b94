// Files that a training writes while it runs: a table, TensorBoard's events, a page.
#pragma once

#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/recording/event_file.h"
#include "plumb/training/options.h"

namespace plumb {

struct StepNumbers {
  int64_t step = 0;
  double loss = 0, lr = 0, norm = 0, rows_per_second = 0, tokens_per_second = 0;  // no tokens: 0
  double memory = 0;                                                              // bytes of a rank at most
  double seconds = 0;
  std::optional<double> eval_loss;
};

// On rank 0. In a run that goes on the table goes on, TensorBoard gets another file beside the first, and the page
// shows the steps of the table, or without one those since. Steps that are computed again are there once: the lines
// that there were of them go.
class RunLog {
 public:
  // `after`: the step that the run goes on after; none for one that begins. Throws Error(CannotWrite).
  RunLog(const TrainOptions& options, std::optional<int64_t> after);
  // Writes the page if the last one is some seconds old (and twenty times as long as it takes), or `last`. Answers ""
  // or what cannot be written any more: each of the files is given up when it fails, the training is not.
  std::string add(const StepNumbers& numbers, bool last);

 private:
  void open_table(int64_t start);
  void add_line(const StepNumbers& numbers);
  void write_page() const;

  const TrainOptions& options_;
  std::ofstream table_;
  std::unique_ptr<EventFile> events_;
  bool page_ = false;
  std::vector<StepNumbers> steps_;
  std::chrono::steady_clock::time_point next_page_;
};

}  // namespace plumb
