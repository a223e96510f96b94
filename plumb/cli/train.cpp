// plumb train: the command line, the local processes, and what is printed. The work is that of plumb/training.
#include <ATen/Parallel.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/cli/signals.h"
#include "plumb/core/join.h"
#include "plumb/core/table.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/launch/launch.h"
#include "plumb/training/plan/dry_run.h"
#include "plumb/training/ranks.h"
#include "plumb/training/recovery/lasting.h"
#include "plumb/training/trainer.h"

namespace plumb::cli {
namespace {

// Prints events: JSON lines, a bar on a terminal, or plain lines. A rank prints all, for its launcher to choose.
class Printer {
 public:
  explicit Printer(const TrainOptions& o)
      : options_(o),
        json_(o.json),
        quiet_(o.quiet && !started_by_plumb()),
        bar_(!o.json && ::isatty(STDOUT_FILENO) == 1),
        print_options_(o.options == "-"),
        every_(o.log_every) {}
  ~Printer() { end_bar(); }
  void end_bar() {
    if (open_) std::cout << std::endl;
    open_ = false;
  }
  void say(std::ostream& out, const std::string& line) {
    end_bar();
    const bool could_write = out.good();
    out << line << std::endl;
    if (could_write && !out.good() && &out == &std::cout && !started_by_plumb())
      std::cerr << "plumb: standard output cannot be written: nobody reads it any more, or its disk is full; the "
                   "training goes on, and will save"
                << std::endl;
  }

  void operator()(const TrainEvent& event) {
    if (std::holds_alternative<event::Saved>(event) || std::holds_alternative<event::CheckpointWritten>(event))
      note_saved();
    const std::string* problem = problem_of(event);
    if (quiet_ && problem == nullptr) return;
    if (json_) return say(std::cout, to_json(event).dump());
    if (problem != nullptr) return say(std::cerr, "plumb: " + *problem);
    std::visit([this](const auto& e) { show(e); }, event);
  }

 private:
  // Returns null for an event that is no problem.
  static const std::string* problem_of(const TrainEvent& event) {
    if (const auto* e = std::get_if<event::CheckpointProblem>(&event)) return &e->problem;
    if (const auto* e = std::get_if<event::LogProblem>(&event)) return &e->problem;
    if (const auto* e = std::get_if<event::Restarted>(&event)) return &e->why;
    if (const auto* e = std::get_if<event::AuditFailed>(&event)) {
      static std::string text;
      text = c10::str("audit: rank ", e->rank, " is wrong in step ", e->step, ": ", e->tensor, ": ", e->why);
      return &text;
    }
    return nullptr;
  }

  void show(const event::Started& e) {
    if (print_options_) std::cerr << e.options;
  }
  // A comment of TOML: what is printed before the first step can be kept as a file for --config.
  void show(const event::Group& e) { say(std::cerr, "# group " + e.group + ": " + join(e.parameters)); }
  void show(const event::OwnRates& e) { say(std::cout, "# learning rates: " + e.why); }
  void show(const event::Resumed& e) {
    first_step_ = 0;  // the clock of the steps begins anew
    say(std::cout, e.steps && *e.steps <= e.step
                       ? c10::str("all ", e.step, " steps were done before, in ", e.folder,
                                  ": nothing is trained (more --steps go on, --no-resume begins anew)")
                       : c10::str("goes on after step ", e.step, " from ", e.folder));
  }
  void show(const event::Stepped& e) {
    const std::string tail =
        "  loss " + number(e.loss) + "  norm " + short_number(e.norm) + "  lr " + short_number(e.lr) + speed(e);
    if (!bar_ && e.step % every_ != 0 && e.step != e.steps) return;
    if (!bar_) return say(std::cout, c10::str("step ", e.step, "/", e.steps, tail));
    std::cout << "\r" << bar_text(static_cast<int>(e.step), static_cast<int>(e.steps)) << tail << "\x1b[K"
              << std::flush;
    open_ = true;
  }
  void show(const event::Evaluated& e) {
    say(std::cout, c10::str("evaluation after step ", e.step, ": loss ", number(e.loss), ", perplexity ",
                            short_number(std::exp(e.loss)), ", ", e.targets, " targets"));
  }
  void show(const event::CheckpointWritten& e) { say(std::cout, "wrote " + e.folder); }
  void show(const event::Copied& e) {
    say(std::cout, c10::str("the state of step ", e.step, " is on another host, too: ", short_number(e.bytes / 1e6),
                            " MB of rank ", e.rank, " in ", short_number(e.seconds), " s beside the steps, ",
                            percent(e.in_bubbles), " of it while it waited"));
  }
  void show(const event::Interrupted& e) {
    say(std::cout, c10::str("interrupted: step ", e.step, "/", e.steps, " was the last"));
  }
  void show(const event::Saved& e) { say(std::cout, "saved " + e.path); }
  void show(const event::Dumped& e) { say(std::cout, "dumped the step to " + e.folder); }
  void show(const event::Concluded& e) { say(std::cout, c10::str("verdict at step ", e.at_step, ": ", e.text)); }
  void show(const event::Drew& e) {
    say(std::cout, "drew " + e.path + "  bubble " + percent(e.bubble) + "\n" + e.conclusion);
  }
  void show(const TrainNeeds& e) {
    std::cout << to_text(e, options_);  // which ends its last line
  }
  void show(const auto&) {}  // for --json only

  // Returns "  0.12 s a step, 17000 tokens/s, 0.4 GB, 1 min 20 s left". The first step is left out of the mean: it also
  // makes what later steps find made.
  std::string speed(const event::Stepped& e) {
    if (first_step_ == 0) first_step_ = e.step, first_seconds_ = e.seconds;
    const auto steps = static_cast<double>(e.step - first_step_);
    const double each = steps == 0 ? e.seconds : (e.seconds - first_seconds_) / steps;
    std::string text = "  " + short_number(each) + " s a step";
    if (e.tokens) text += ", " + rate_text(static_cast<double>(*e.tokens) / each) + " tokens/s";
    if (e.memory > 0) text += ", " + short_number(e.memory / 1e9) + " GB";
    if (e.step < e.steps) text += ", " + duration_text(each * static_cast<double>(e.steps - e.step)) + " left";
    return text;
  }

  static std::string number(double value) {
    if (std::isnan(value)) return "nan";
    char text[32];
    std::snprintf(text, sizeof text, "%.6f", value);
    return text;
  }
  const TrainOptions& options_;  // they outlive the training
  const bool json_, quiet_, bar_, print_options_;
  const int64_t every_;
  bool open_ = false;
  double first_seconds_ = 0;
  int64_t first_step_ = 0;
};

// Exit code of a training that SIGTERM or SIGUSR1 ended after a checkpoint: run it again (EX_TEMPFAIL of sysexits.h).
constexpr int kGoesOnLater = 75;

bool goes_on_later(const TrainOptions& o, int signal) {
  return (signal == SIGTERM || signal == SIGUSR1) && !o.checkpoints.empty();
}

int end_interrupted(const TrainOptions& o, int signal) {
  if (goes_on_later(o, signal) && anything_saved()) return kGoesOnLater;
  std::cerr << "\nplumb: interrupted" << what_was_saved() << "\n";
  end_by_signal(signal);
}

std::string how_it_failed(int rank, const ProcessEnd& end) {
  return c10::str("rank ", rank,
                  end.was_stopped  ? " was stopped by a signal for too long"
                  : end.was_silent ? " did not end its step for too long after others were lost"
                  : end.signal != 0
                      ? " was killed by signal " + std::to_string(end.signal) + " (" + ::strsignal(end.signal) + ")"
                      : " failed with exit code " + std::to_string(end.exit_code));
}

int launch(const TrainOptions& o) {
  Printer print(o);
  if (!o.options.empty() && o.options != "-") write_text(to_toml(o), o.options);
  LaunchOptions launch;
  int interrupted_by = 0;  // a signal that came to ranks alone and ended the training
  launch.num_processes = o.processes();
  launch.arguments = own_arguments();
  if (!o.json) launch.arguments.push_back("--json");
  launch.on_line = [&](int rank, bool is_stderr, const std::string& line) {
    auto event = event_from_json(is_stderr ? nlohmann::json() : nlohmann::json::parse(line, nullptr, false));
    if (event) {
      if (auto* e = std::get_if<event::Started>(&*event)) e->options = to_toml(o);  // the user's, without --json
      if (const auto* e = std::get_if<event::Interrupted>(&*event)) interrupted_by = e->signal;
      if (std::holds_alternative<event::Resumed>(*event)) interrupted_by = 0;
      print(*event);
    } else {
      std::cerr << (rank < 0 ? "[spare] " : c10::str("[rank ", rank, "] ")) << line << std::endl;
    }
  };
  const KeptSignal signal(/*others=*/true);
  launch.signal = [&] { return signal.to_pass_on(); };
  launch.replacements = static_cast<int>(o.max_restarts);
  launch.spares = static_cast<int>(o.spares);
  launch.patience_with_stopped = std::chrono::seconds(o.patience);
  // Gloo (torch 2.13) tells the end of a connection to operations that wait to begin, not to one that has begun: that
  // takes its whole time-out, and then a moment to say why.
  launch.patience_with_silent = std::chrono::seconds(o.patience + 15);
  int64_t lost = 0;
  launch.on_lost = [&](int rank, const ProcessEnd& end, const std::string& instead) {
    if (!end.was_silent) ++lost;  // a part of the loss before
    print(event::Restarted{lost, o.max_restarts, rank,
                           c10::str(how_it_failed(rank, end), ": ", instead, " (", lost, " of ", o.max_restarts, ")")});
  };
  if (o.recut) launch.fewer = [&](int left) { return fewer_processes(o, left); };
  const LaunchResult result = launch_local(launch);
  print.end_bar();
  if (signal.taken() != 0) return end_interrupted(o, signal.taken());
  if (result.first_failed < 0 && interrupted_by != 0) return end_interrupted(o, interrupted_by);
  if (result.first_failed < 0) return result.exit_code();
  const ProcessEnd& end = result.processes[static_cast<size_t>(result.first_failed)];
  std::cerr << "plumb: " << how_it_failed(result.first_failed, end) << ": training ended" << what_was_saved() << "\n";
  if (end.signal == SIGKILL && !end.was_stopped && !end.was_silent)
    std::cerr << "  try: less memory a process: more --stages, or smaller microbatches\n";
  return result.exit_code();
}

// Says on stderr how far a long step is: first after a second, then less and less often.
class StepProgress {
 public:
  void operator()(int64_t step, size_t done, size_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (step != step_ || done <= done_) begin_ = now, next_ = 1;
    step_ = step;
    done_ = done;
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    if (seconds < next_ || done == total) return;
    next_ = 2 * seconds;
    std::fprintf(stderr, "step %lld: %zu of %zu actions after %.0f s\n", static_cast<long long>(step), done, total,
                 seconds);
  }

 private:
  int64_t step_ = 0;
  size_t done_ = 0;
  double next_ = 1;
  std::chrono::steady_clock::time_point begin_;
};

int train_here(const TrainOptions& o) {
  Printer print(o);
  std::optional<KeptSignal> signal;
  StepProgress steps;
  Progress progress(2, o.json || o.quiet || o.processes() > 1);
  TrainHooks hooks{.event = std::ref(print), .phase = [&](const std::string& what) { progress.next(what); }};
  if (!o.json && !o.quiet) hooks.progress = std::ref(steps);
  // Long enough for a busy host: the launcher's store is there or will never be.
  const auto members = Membership::from_environment(std::chrono::seconds(std::max<int64_t>(o.patience, 5)));
  const bool stoppable = o.saves_weights();
  if (stoppable) hooks.stop_signal = [&] { return signal->taken(); };
  const auto keep_signals = [&] {
    progress.finish();
    if (stoppable) signal.emplace(/*others=*/!o.checkpoints.empty());
  };
  int stopped_by = 0;
  const auto place = discover_ranks();
  if (members) {
    keep_signals();
    stopped_by = train_lasting(o, hooks, *members).stopped_by;
  } else if (o.max_restarts > 0 && place && place->starts_again) {
    stopped_by = train_on_hosts(o, hooks, *place, keep_signals).stopped_by;
  } else {
    Trainer trainer(o, hooks);
    keep_signals();
    stopped_by = trainer.run().stopped_by;
  }
  print.end_bar();
  // A process that plumb started leaves it to the one that started it.
  if (stopped_by == 0 || started_by_plumb()) return 0;
  if (goes_on_later(o, stopped_by)) return kGoesOnLater;
  end_by_signal(stopped_by);
}

int dry_run(const TrainOptions& o) {
  Progress progress(3, o.json);
  at::set_num_threads(o.threads > 0 ? static_cast<int>(o.threads) : at::get_num_threads());
  const TrainJob job = prepare_job(o, {}, {.phase = [&](const std::string& what) { progress.next(what); }});
  progress.next("measuring the stages");
  const TrainNeeds needs = measure_needs(o, job);
  progress.finish();
  std::cout << (o.json ? to_json(needs).dump() + "\n" : to_text(needs, o));
  return 0;
}

// Before it is needed.
void check_recut(const TrainOptions& o) {
  const int fewer = fewer_processes(o, o.processes() - 1);
  if (fewer == 0)
    throw UsageError("--recut: there is no layout on fewer processes", "leave --recut out, or more --stages");
  used_by(c10::str("--recut, on ", fewer, " processes"), [&] { prepare_job(options_for(o, fewer), {}, {}); });
}

// A machine's processes; more of them are started by torchrun or SLURM, over several.
constexpr int kMostHere = 1024;

int train_command(const TrainOptions& o) {
  // The reader of what is printed may go (`| head`): the weights are not lost with it. Where there is nothing to lose
  // the signal ends the training, as it ends other commands.
  if (o.saves_weights()) ::signal(SIGPIPE, SIG_IGN);
  const auto environment = discover_ranks();
  const bool on_hosts = environment && environment->starts_again && o.max_restarts > 0;
  const bool alone = !environment || (environment->world_size == 1 && !on_hosts);
  if (o.dry_run && alone) return dry_run(o);
  if (alone && !started_by_plumb() && o.processes() > kMostHere) {
    throw UsageError(c10::str("--stages ", o.stages, " --data-parallel ", o.replicas, ": are ", o.processes(),
                              " processes on this machine, ", kMostHere, " at most"),
                     "fewer, or torchrun or srun over several machines");
  }
  if (!o.saves_weights() && !o.dry_run) {
    note_nothing_to_save();
    if (!started_by_plumb() && (alone || environment->rank == 0))
      std::cerr << "plumb: what is learned will be lost: no --save, --save-hf or --checkpoints" << std::endl;
  }
  const bool others_start = !alone && !started_by_plumb();
  if (others_start && o.spares > 0) {
    throw UsageError("--spares: " + environment->launcher + " starts the processes",
                     "leave it out; under torchrun, ranks that the layout does not need are spares");
  }
  const bool lasts = o.max_restarts > 0 && !started_by_plumb();
  if (!alone && !on_hosts && o.recut && !started_by_plumb() &&
      fewer_processes(o, environment->world_size) == environment->world_size)
    return train_here(options_for(o, environment->world_size));  // as many as the other launcher has
  if (!alone || (o.processes() == 1 && !lasts)) return train_here(o);
  if (o.copies_to_neighbor > 0)
    throw UsageError("--copies-to-neighbor: all processes are on this host",
                     "leave it out, or torchrun over several hosts");
  {
    Progress progress(2, o.json || o.quiet);
    check_training(o, {.phase = [&](const std::string& what) { progress.next(what); }});  // said once, not by all
    if (o.recut) check_recut(o);
  }
  return launch(o);
}

}  // namespace

void add_train(CLI::App& app) {
  struct Given {
    std::string config;
    FieldTexts texts;  // on top of the file's
  };
  CLI::App* sub = app.add_subcommand("train", "Trains a .pt2 file, in one process or as a pipeline of several");
  auto given = std::make_shared<Given>();
  for (const TrainField& field : train_fields()) add_field(sub, field, given->texts);
  sub->add_option("--config", given->config,
                  "A TOML file of these options by name, NAME = VALUE; what stands on the command line goes before");
  sub->footer(
      "Example:\n  plumb train gpt.pt2 --data text.bin --loss cross_entropy --lr 1e-3 --steps 200 --microbatches 4 "
      "--stages 2 --save trained.pt2");
  sub->callback([given] {
    TrainOptions o;
    before_meeting([&] {
      o = read_options(given->config, given->texts);
      check_wire(o);
    });
    if (const int code = train_command(o); code != 0) throw ExitCode{code};
  });
}

}  // namespace plumb::cli
