// Files that a training writes while it runs: a table, TensorBoard's events, a page; and its time line.
#pragma once

#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/analysis/adapters.h"
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

// Writes on rank 0. In a run that goes on the table goes on, TensorBoard gets another file beside the first, and the
// page shows the steps of the table, or without one those since. Steps that are computed again are there once: their
// earlier lines go.
class RunLog {
 public:
  // `after`: the step that the run goes on after; none for one that begins. Throws Error(CannotWrite), and
  // Error(InvalidState) for a run that begins with another run's table, or in a TensorBoard folder with its events.
  // With `by_itself` it throws neither: the run goes on after a loss, and a file that cannot be opened is given up.
  RunLog(const TrainOptions& options, std::optional<int64_t> after, bool by_itself = false);
  // Writes the page if the last one is some seconds old (and twenty times as long as it takes), or `last`. Returns ""
  // or the files that cannot be written any more: each is given up when it fails, the training is not.
  std::string add(const StepNumbers& numbers, bool last);

 private:
  template <class Write, class GiveUp>
  void attempt(const char* option, const Write& write, const GiveUp& give_up);
  void open_table(std::optional<int64_t> after);
  void add_line(const StepNumbers& numbers);
  void write_page(bool last) const;

  const TrainOptions& options_;
  std::ofstream table_;
  std::unique_ptr<EventFile> events_;
  bool page_ = false;
  std::string problems_;  // errors of files given up since the last add()
  std::vector<StepNumbers> steps_;
  std::chrono::steady_clock::time_point next_page_;
};

// Throws UsageError for a name that ends neither in .svg nor in .json. "": none.
void check_timeline(const std::string& path);

// Writes `path`: a picture of the last step beside its simulations (.svg; measured_step), or trace events of all steps
// for chrome://tracing and Perfetto (.json). Each step's events are those of all ranks, on the clock of the ranks; the
// last of `steps` is the step `last`.
MeasuredStep draw_timeline(const std::string& path, const Schedule& schedule,
                           const std::vector<std::vector<TimelineEvent>>& steps, int last);

}  // namespace plumb
