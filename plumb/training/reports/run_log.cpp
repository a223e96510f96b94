#include "plumb/training/reports/run_log.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "plumb/analysis/html_report.h"
#include "plumb/core/output_file.h"
#include "plumb/core/table.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr std::chrono::seconds kPageEvery{5};
constexpr const char* kColumns = "step,loss,lr,norm,rows_per_second,tokens_per_second,memory,seconds,eval_loss";

std::string csv_number(double value) {
  return std::isfinite(value) ? nlohmann::json(value).dump() : std::isnan(value) ? "nan" : "inf";
}

LineChart chart_of(const std::string& title, const std::vector<StepNumbers>& steps, double StepNumbers::*number) {
  Curve curve{title, {}, {}};
  for (const StepNumbers& s : steps) {
    curve.values.push_back(s.*number);
    curve.steps.push_back(static_cast<double>(s.step));
  }
  LineChart chart;
  chart.title = title;
  chart.curves = {std::move(curve)};
  chart.height = 260;
  chart.smooth = std::clamp(static_cast<int>(steps.size() / 10), 1, 100);  // one step says little
  return chart;
}

// Parses a line of the table.
StepNumbers numbers_of(const std::string& line) {
  const char* at = line.c_str();
  const auto next = [&] {
    char* end = nullptr;
    const double value = std::strtod(at, &end);
    at = *end == ',' ? end + 1 : end;
    return value;
  };
  StepNumbers n;
  n.step = static_cast<int64_t>(next());
  for (double* value : {&n.loss, &n.lr, &n.norm, &n.rows_per_second, &n.tokens_per_second, &n.memory, &n.seconds})
    *value = next();
  if (*at != '\0') n.eval_loss = next();
  return n;
}

// TensorBoard shows all events of a folder as one run.
void check_no_other_run(const std::string& folder) {
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
    if (!entry.path().filename().string().starts_with("events.out.tfevents.")) continue;
    throw Error(ErrorKind::InvalidState, "--tensorboard " + folder + ": holds the events of another run", "",
                "a folder of its own beside it, " + (std::filesystem::path(folder) / "NAME").string() +
                    ": TensorBoard shows each folder below its own as a run");
  }
}

// `empty`: a table without steps.
void check_no_other_table(const std::string& path, const std::string& empty) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(path, failed) || std::filesystem::file_size(path, failed) == 0) return;
  std::ifstream file(path);
  std::string begin(empty.size() + 1, '\0');
  file.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  begin.resize(static_cast<size_t>(file.gcount()));
  if (begin == empty) return;
  throw Error(ErrorKind::InvalidState,
              "--csv " + path + ": is there already, " +
                  (begin.starts_with(empty) ? "the table of another run" : "and is no table of a training"),
              "", "another file, or remove that one");
}

// Returns the record so far, of all stages; nothing while it is not at hand, or on other machines.
std::optional<HistoryView> recorded(const TrainOptions& o) {
  if (o.history.empty()) return std::nullopt;
  try {
    HistoryView view{o.file.empty() ? "a model" : o.file, {}, {FPFormat::parse("E4M3"), FPFormat::parse("E5M2")}};
    view.runs.push_back({"this run", read_history(o.history)});
    check_recorded(view);
    return view;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

RunLog::RunLog(const TrainOptions& options, std::optional<int64_t> after, bool by_itself)
    : options_(options), page_(!options.page.empty()) {
  const auto open = [&](const char* option, const auto& make) { by_itself ? attempt(option, make, [] {}) : make(); };
  if (!options.csv.empty()) open("--csv", [&] { open_table(after); });
  if (!options.tensorboard.empty() && !after) check_no_other_run(options.tensorboard);
  if (!options.tensorboard.empty())
    open("--tensorboard", [&] { events_ = std::make_unique<EventFile>(options.tensorboard, after); });
}

template <class Write, class GiveUp>
void RunLog::attempt(const char* option, const Write& write, const GiveUp& give_up) {
  try {
    write();
  } catch (const Error& e) {
    give_up();
    problems_ += (problems_.empty() ? "" : "; ") + std::string(option) + " ends here: " + e.message();
  }
}

// The lines of steps that are not done again stay.
void RunLog::open_table(std::optional<int64_t> after) {
  std::string kept = std::string(kColumns) + "\n";
  if (!after) check_no_other_table(options_.csv, kept);
  const int64_t start = after.value_or(0);
  if (start > 0 && std::filesystem::exists(options_.csv)) {
    std::ifstream before(options_.csv);
    std::string line;
    std::getline(before, line);
    if (line != kColumns) {
      throw Error(ErrorKind::InvalidState, "--csv " + options_.csv + ": has other columns than " + kColumns, "",
                  "another file");
    }
    while (std::getline(before, line) && std::strtoll(line.c_str(), nullptr, 10) <= start) {
      kept += line + "\n";
      if (page_) steps_.push_back(numbers_of(line));
    }
  }
  write_file_atomically(options_.csv, kept);
  table_.open(options_.csv, std::ios::app);
}

void RunLog::add_line(const StepNumbers& n) {
  table_ << n.step;
  for (const double value : {n.loss, n.lr, n.norm, n.rows_per_second, n.tokens_per_second, n.memory, n.seconds})
    table_ << "," << csv_number(value);
  table_ << "," << (n.eval_loss ? csv_number(*n.eval_loss) : "") << std::endl;
  if (!table_) throw Error(ErrorKind::CannotWrite, options_.csv + ": cannot be written: " + std::strerror(errno));
}

std::string RunLog::add(const StepNumbers& n, bool last) {
  if (table_.is_open()) attempt("--csv", [&] { add_line(n); }, [&] { table_.close(); });
  if (events_) {
    std::vector<std::pair<std::string, double>> values = {
        {"loss", n.loss}, {"lr", n.lr}, {"gradient_norm", n.norm}, {"rows_per_second", n.rows_per_second}};
    if (n.tokens_per_second > 0) values.emplace_back("tokens_per_second", n.tokens_per_second);
    values.emplace_back("memory", n.memory);
    if (n.eval_loss) values.emplace_back("eval_loss", *n.eval_loss);
    attempt("--tensorboard", [&] { events_->add(n.step, values); }, [&] { events_.reset(); });
  }
  if (!page_) return std::exchange(problems_, {});
  steps_.push_back(n);
  const auto before = std::chrono::steady_clock::now();
  if (!last && before < next_page_) return std::exchange(problems_, {});
  attempt("--page", [&] { write_page(last); }, [&] { page_ = false; });
  const auto now = std::chrono::steady_clock::now();
  next_page_ = now + std::max<std::chrono::steady_clock::duration>(kPageEvery, 20 * (now - before));
  return std::exchange(problems_, {});
}

void RunLog::write_page(bool last) const {
  const StepNumbers& now = steps_.back();
  HtmlReport report("Training", options_.file.empty() ? "a model" : options_.file);
  if (!last) report.reload_every(static_cast<int>(kPageEvery.count()));
  std::vector<Figure> figures = {{c10::str(now.step, " of ", options_.steps), "steps", ""},
                                 {short_number(now.loss), "loss", ""},
                                 now.tokens_per_second > 0
                                     ? Figure{rate_text(now.tokens_per_second), "tokens a second", ""}
                                     : Figure{rate_text(now.rows_per_second), "rows a second", ""},
                                 {short_number(now.memory / 1e9) + " GB", "memory of a rank", "the largest"}};
  LineChart losses = chart_of("loss", steps_, &StepNumbers::loss);
  Curve evaluations{"held-out data", {}, {}};
  for (const StepNumbers& s : steps_) {
    if (!s.eval_loss) continue;
    evaluations.values.push_back(*s.eval_loss);
    evaluations.steps.push_back(static_cast<double>(s.step));
  }
  if (!evaluations.values.empty()) {
    figures.push_back({short_number(evaluations.values.back()), "loss on held-out data", ""});
    losses.curves.push_back(std::move(evaluations));
  }
  report.figures(figures);
  auto section = [&](const char* title, const LineChart& chart) {
    report.section(title).prose(conclusion(chart)).add(chart);
  };
  section("Losses", losses);
  LineChart rates = chart_of("learning rate", steps_, &StepNumbers::lr);
  rates.smooth = 1;
  rates.peak = true;
  section("Learning rate", rates);
  LineChart norms = chart_of("norm of the gradient", steps_, &StepNumbers::norm);
  norms.log_y = true;
  section("Norm of the gradient", norms);
  section("Throughput", now.tokens_per_second > 0 ? chart_of("tokens a second", steps_, &StepNumbers::tokens_per_second)
                                                  : chart_of("rows a second", steps_, &StepNumbers::rows_per_second));
  if (const auto view = recorded(options_)) report.section("Scales").prose(conclusion(*view)).add(*view);
  report.section("Options").code(to_toml(options_));
  report.write(options_.page);
}

void check_timeline(const std::string& path) {
  if (path.empty()) return;
  if (!path.ends_with(".svg") && !path.ends_with(".json")) {
    throw UsageError("--timeline " + path + ": is neither .svg nor .json", "--timeline step.svg");
  }
}

MeasuredStep draw_timeline(const std::string& path, const Schedule& schedule,
                           const std::vector<std::vector<TimelineEvent>>& steps, int last) {
  MeasuredStep step = measured_step(schedule, steps.back());
  if (path.ends_with(".json")) {
    // One clock for all steps.
    double first = INFINITY;
    for (const auto& events : steps) {
      for (const TimelineEvent& e : events) first = std::min(first, e.waiting);
    }
    std::vector<TimelineRun> runs;
    int number = last - static_cast<int>(steps.size());
    for (const auto& events : steps) {
      TimelineRun run = timeline_of(events, "step " + std::to_string(++number));
      double begin = INFINITY;
      for (const TimelineEvent& e : events) begin = std::min(begin, e.waiting);
      for (TimelineAction& a : run.actions) {
        for (double* t : {&a.waiting, &a.start, &a.end}) *t += begin - first;
      }
      runs.push_back(std::move(run));
    }
    write_file_atomically(path, to_trace(runs));
  } else {
    write_file_atomically(path, to_svg(step.chart));
  }
  return step;
}

}  // namespace plumb
