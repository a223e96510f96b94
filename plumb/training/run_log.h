// Files that a training writes while it runs: a table, TensorBoard's events, a page.
#pragma once

#include <chrono>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plumb/analysis/line_chart.h"
#include "plumb/training/options.h"

namespace plumb {

struct StepNumbers {
  int64_t step = 0;
  double loss = 0, lr = 0, norm = 0, rows_per_second = 0, seconds = 0;
  std::optional<double> eval_loss;
};

// On rank 0. After a resume the table goes on, TensorBoard gets another file beside the first, and the page shows the
// steps since.
class RunLog {
 public:
  // `start`: the step that the run goes on after. Throws Error(CannotWrite).
  RunLog(const TrainOptions& options, int64_t start);
  // Writes the page if the last one is some seconds old, or `last`.
  void add(const StepNumbers& numbers, bool last);

 private:
  void open_table(int64_t start);
  void open_events();
  void write_event(const std::string& fields);
  void write_page() const;

  const TrainOptions& options_;
  std::ofstream table_, events_;
  std::vector<StepNumbers> steps_;
  std::chrono::steady_clock::time_point page_written_;
};

}  // namespace plumb
