#include "plumb/training/reports/run_reports.h"

#include "plumb/analysis/verdict_page.h"
#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/pipeline/launch/environment.h"

namespace plumb {

bool RunReports::attempt(const std::string& option, const std::function<void()>& write) const {
  try {
    write();
    return true;
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::CannotWrite || o_.replay > 0) throw;  // a replay is run for its file
    emit(event::LogProblem{option + " ends here: " + e.message()});
    return false;
  }
}

void RunReports::started() const {
  if (!is_first_) return;
  emit(event::Started{to_toml(o_)});
  if (!o_.options.empty() && o_.options != "-" && !started_by_plumb()) write_file_atomically(o_.options, to_toml(o_));
  for (size_t g = 0; g < job_.by_group.size(); ++g) emit(event::Group{o_.groups[g], job_.by_group[g]});
  if (job_.tagged) emit(event::OwnRates{"u-muP's, of each parameter's own, for the file's parameters are tagged"});
}

void RunReports::begin(std::optional<int64_t> after, bool by_itself) {
  if (is_first_) log_ = std::make_unique<RunLog>(o_, after, by_itself);
  begin_ = std::chrono::steady_clock::now();
}

void RunReports::step(int64_t step, const TrainStep::Numbers& numbers, const Parts& parts, double rate) {
  if (!is_first_) return;
  const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  const std::optional<int64_t> tokens = parts.tokens() > 0 ? std::optional(parts.tokens()) : std::nullopt;
  emit(event::Stepped{step, o_.steps, numbers.loss, rate, numbers.norm, job_.rows, tokens, numbers.memory, now});
  const double each = now - last_.seconds;
  last_ = {.step = step,
           .loss = numbers.loss,
           .lr = rate,
           .norm = numbers.norm,
           .rows_per_second = static_cast<double>(job_.rows) / each,
           .tokens_per_second = static_cast<double>(parts.tokens()) / each,
           .memory = numbers.memory,
           .seconds = now};
}

void RunReports::evaluated(int64_t step, double loss, int64_t targets) {
  if (is_first_) emit(event::Evaluated{step, loss, targets});
  last_.eval_loss = loss;
}

void RunReports::log(bool last) {
  const std::string problem = log_ ? log_->add(last_, last) : "";
  if (!problem.empty()) emit(event::LogProblem{problem});
}

void RunReports::concluded(int64_t step, const VerdictReport& report) const {
  if (!o_.verdict_page.empty())
    attempt("--verdict-page", [&] { verdict_page(report, o_.file).write(o_.verdict_page); });
  if (!o_.verdict_recipe.empty())
    attempt("--verdict-recipe", [&] { write_file_atomically(o_.verdict_recipe, report.recipe_file()); });
  emit(event::Concluded{report.to_json(), step, report.to_text()});
}

void RunReports::checkpoints(const std::vector<CheckpointReport>& reports) const {
  for (const CheckpointReport& report : reports) {
    if (!report.problem.empty()) emit(event::CheckpointProblem{report.problem});
    if (report.folder.empty()) continue;
    emit(event::CheckpointWritten{report.step, report.folder, report.copied + report.waited, report.written});
  }
}

void RunReports::keep_timeline(int64_t step, std::vector<TimelineEvent> events) {
  timelines_.push_back(std::move(events));
  last_timeline_ = step;
}

void RunReports::draw_timeline() const {
  if (o_.timeline.empty() || timelines_.empty()) return;
  attempt("--timeline", [&] {
    const MeasuredStep drawn =
        plumb::draw_timeline(o_.timeline, job_.schedule, timelines_, static_cast<int>(last_timeline_));
    emit(event::Drew{o_.timeline, drawn.bubble, drawn.conclusion});
  });
}

}  // namespace plumb
