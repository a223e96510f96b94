// Reports of a rank on a run: events, and on rank 0 a table, a page and a time line.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/checkpoint/checkpoint_writer.h"
#include "plumb/training/job.h"
#include "plumb/training/reports/run_log.h"
#include "plumb/training/step/loss.h"
#include "plumb/training/step/train_step.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb {

class RunReports {
 public:
  // All must outlive it.
  RunReports(const TrainOptions& options, const TrainHooks& hooks, const TrainJob& job, bool is_first)
      : o_(options), hooks_(hooks), job_(job), is_first_(is_first) {}

  void emit(const TrainEvent& event) const {
    if (hooks_.event) hooks_.event(event);
  }
  // Calls `write`. Returns false for a report that cannot be written, which is given up; the training is not.
  bool attempt(const std::string& option, const std::function<void()>& write) const;
  // Reports the options and what follows from them.
  void started() const;
  // Opens the files and starts the clock. `after`: the step that the run goes on after; null: the run begins. With
  // `by_itself` a file that cannot be opened is given up.
  void begin(std::optional<int64_t> after, bool by_itself);
  void step(int64_t step, const TrainStep::Numbers& numbers, const Parts& parts, double rate);
  void evaluated(int64_t step, double loss, int64_t targets);
  // Writes the files of a verdict that the options name.
  void concluded(int64_t step, const VerdictReport& report) const;
  // Writes the last step's line.
  void log(bool last);
  void checkpoints(const std::vector<CheckpointReport>& reports) const;

  // Keeps a step's events for the time line.
  void keep_timeline(int64_t step, std::vector<TimelineEvent> events);
  void draw_timeline() const;

 private:
  const TrainOptions& o_;
  const TrainHooks& hooks_;
  const TrainJob& job_;
  const bool is_first_;
  std::unique_ptr<RunLog> log_;  // null: another rank than 0
  std::chrono::steady_clock::time_point begin_;
  StepNumbers last_;
  std::vector<std::vector<TimelineEvent>> timelines_;
  int64_t last_timeline_ = 0;
};

}  // namespace plumb
