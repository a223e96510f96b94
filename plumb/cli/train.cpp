// plumb train: the command line, the local processes, and what is printed. The work of one process is in train_rank.
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <fstream>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/exit_code.h"
#include "plumb/cli/progress.h"
#include "plumb/cli/signals.h"
#include "plumb/cli/train_rank.h"
#include "plumb/core/table.h"
#include "plumb/pipeline/environment.h"
#include "plumb/pipeline/launch.h"
#include "plumb/schedule/generators.h"

namespace plumb::cli {
namespace {

// Prints events: JSON lines, a bar on a terminal, or plain lines.
class Printer {
 public:
  bool saved() const { return saved_; }
  explicit Printer(bool json) : json_(json), bar_(!json && ::isatty(STDOUT_FILENO) == 1) {}
  ~Printer() { end_bar(); }
  void end_bar() {
    if (open_) std::cout << std::endl;
    open_ = false;
  }

  void operator()(const nlohmann::json& event) {
    if (json_) {
      saved_ = saved_ || event.contains("saved");
      std::cout << event.dump() << std::endl;
      return;
    }
    if (event.contains("interrupted")) {
      end_bar();
      std::cout << "interrupted: step " << event["interrupted"] << "/" << event["steps"] << " was the last"
                << std::endl;
      return;
    }
    if (event.contains("saved")) {
      saved_ = true;
      end_bar();
      std::cout << "saved " << event["saved"].get<std::string>() << std::endl;
      return;
    }
    if (event.contains("drew")) {
      end_bar();
      std::cout << "drew " << event["drew"].get<std::string>() << "  bubble " << percent(event["bubble"]) << std::endl
                << event["conclusion"].get<std::string>() << std::endl;
      return;
    }
    if (event.contains("learning_rates")) {
      std::cout << "learning rates: " << event["learning_rates"].get<std::string>() << std::endl;
      return;
    }
    if (!event.contains("step")) return;
    const int step = event["step"], steps = event["steps"];
    const std::string loss = event["loss"].is_number() ? number(event["loss"]) : "nan";
    const std::string tail = "  loss " + loss + speed(step, steps, event["seconds"]);
    if (!bar_) {
      std::cout << "step " << step << "/" << steps << tail << std::endl;
      return;
    }
    std::cout << "\r" << bar_text(step, steps) << tail << "\x1b[K" << std::flush;
    open_ = true;
  }

 private:
  // "  0.12 s a step, 1 min 20 s left": of the steps after the first, which also makes what later ones find made.
  std::string speed(int step, int steps, double seconds) {
    if (step == 1) first_seconds_ = seconds;
    const double each = step == 1 ? seconds : (seconds - first_seconds_) / (step - 1);
    std::string text = "  " + short_number(each) + " s a step";
    if (step < steps) text += ", " + duration_text(each * (steps - step)) + " left";
    return text;
  }

  static std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6f", value);
    return text;
  }
  const bool json_, bar_;
  bool open_ = false, saved_ = false;
  double first_seconds_ = 0;
};

// This process's own arguments.
std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string a; std::getline(file, a, '\0');) arguments.push_back(a);
  if (!arguments.empty()) arguments.erase(arguments.begin());
  return arguments;
}

int launch(const TrainOptions& o) {
  Printer print(o.json);
  LaunchOptions launch;
  launch.num_processes = o.processes();
  launch.arguments = own_arguments();
  if (!o.json) launch.arguments.push_back("--json");
  launch.on_line = [&](int rank, bool is_stderr, const std::string& line) {
    const auto event = is_stderr ? nlohmann::json() : nlohmann::json::parse(line, nullptr, false);
    if (event.is_object()) {
      print(event);
    } else {
      std::cerr << "[rank " << rank << "] " << line << std::endl;
    }
  };
  const KeptSignal signal(/*others=*/true);
  launch.signal = [&] { return signal.to_pass_on(); };
  const LaunchResult result = launch_local(launch);
  print.end_bar();
  const char* nothing = print.saved() ? "" : ", nothing was saved";
  if (signal.taken() != 0) {
    std::cerr << "\nplumb: interrupted" << nothing << "\n";
    end_by_signal(signal.taken());
  }
  if (result.first_failed >= 0) {
    const ProcessEnd& end = result.processes[result.first_failed];
    const std::string how = end.was_stopped   ? "was stopped by a signal for a minute"
                            : end.signal != 0 ? std::string("was killed by signal ") + std::to_string(end.signal) +
                                                    " (" + ::strsignal(end.signal) + ")"
                                              : "failed with exit code " + std::to_string(end.exit_code);
    std::cerr << "plumb: rank " << result.first_failed << " " << how << ": training ended" << nothing << "\n";
    if (end.signal == SIGKILL && !end.was_stopped)
      std::cerr << "  try: less memory a process: more --stages, or smaller microbatches\n";
  }
  return result.exit_code();
}

int train(const TrainOptions& o) {
  const auto environment = discover_ranks();
  const int processes = environment ? environment->world_size : 1;
  if (processes == 1 && o.processes() > 1) {
    check_train(o);  // wrong use is said once, not by every process
    return launch(o);
  }
  if (processes > 1 && processes != o.processes()) {
    throw UsageError("--stages " + std::to_string(o.stages) + " --data-parallel " + std::to_string(o.replicas) +
                         ": the launcher started " + std::to_string(processes) + " processes",
                     "--stages times --data-parallel of " + std::to_string(processes));
  }
  Printer print(o.json);
  const int signal = train_rank(o, std::ref(print));
  // A process that plumb started leaves it to the one that started it.
  if (signal != 0 && !process_variable("PLUMB_STORE_SOCKET")) end_by_signal(signal);
  return 0;
}

}  // namespace

void add_train(CLI::App& app) {
  auto o = std::make_shared<TrainOptions>();
  std::string schedules;
  for (const std::string& name : schedule_names()) schedules += (schedules.empty() ? "" : ", ") + name;
  CLI::App* sub = app.add_subcommand("train", "Trains a .pt2 file, in one process or as a pipeline of several");
  sub->add_option("FILE", o->file, "A .pt2 file")->required();
  sub->add_option("--data", o->data,
                  "Raw tokens (every other name), or a .pt or .npy of the inputs, one row a sample (several: a dict, "
                  "list or tuple)")
      ->required();
  sub->add_option("--token-type", o->token_type, "Of raw tokens: u8, u16 or i32")
      ->check(CLI::IsMember({"u8", "u16", "i32"}));
  sub->add_option("--targets", o->targets, "A .pt or .npy, one row a sample; raw tokens are their own targets");
  sub->add_option("--loss", o->loss, "cross_entropy, mse, or output: the model returns its loss")
      ->check(CLI::IsMember({"cross_entropy", "mse", "output"}));
  sub->add_option("--optimizer", o->optimizer, "adamw, adam or sgd")->check(CLI::IsMember({"adamw", "adam", "sgd"}));
  sub->add_option("--lr", o->lr, "Learning rate")->check(positive_number);
  sub->add_option("--steps", o->steps, "Optimiser steps")->check(whole_number(1));
  sub->add_option("--batch", o->batch, "Rows of a step (default: the file's batch times the microbatches)")
      ->check(whole_number(1, std::numeric_limits<int64_t>::max()));
  sub->add_option("--microbatches", o->microbatches, "Parts of a batch, each as long as the file's own batch")
      ->check(whole_number(1, 65536));
  sub->add_option("--stages", o->stages, "Pipeline processes; plumb starts them itself, or runs under torchrun")
      ->check(whole_number(1, 1024));
  add_cut_options(sub, o->cuts);
  sub->add_option("--schedule", o->schedule, schedules + ", or a .csv table (plumb plan writes them)");
  sub->add_option("--data-parallel", o->replicas,
                  "So many pipelines beside each other, on parts of the batch of their own; gradients are summed")
      ->check(whole_number(1));
  sub->add_option("--recompute", o->recompute,
                  "cheap: the backward computes results of gelu, norms and the like again instead of keeping them, bit "
                  "for bit the same; none: it keeps everything")
      ->check(CLI::IsMember({"cheap", "none"}));
  sub->add_option(
      "--timeline", o->timeline,
      "Draw the last step beside its simulations (.svg), or write it for Perfetto and chrome://tracing (.json)");
  sub->add_option("--timeline-steps", o->timeline_steps, "So many of the last steps, in a .json time line")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--save", o->save,
                  "The .pt2 file for the trained weights, under the same names. Ctrl-C ends training with its step and "
                  "saves; a second one ends at once");
  sub->add_option("--record", o->record,
                  "A TOML file of rules: what to measure while training, and when (docs/history.md)");
  sub->add_option("--history", o->history,
                  "Where to record it; plumb track --history shows it. With several stages a file each rank, "
                  "FILE.rank0, FILE.rank1, ...");
  sub->add_option("--seed", o->seed, "Of the draw of samples, and of dropout")
      ->check(whole_number(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
  sub->add_option("--threads", o->threads,
                  "Of each process (default: the cores shared out). With the same number losses are equal bit for bit "
                  "whatever the stages, but for dropout (each stage draws its own masks) and for weights tied across "
                  "stages (gradients are summed in another order)")
      ->check(whole_number(1, 1024));
  for (const char* name : {"--token-type", "--loss", "--optimizer", "--lr", "--steps", "--microbatches", "--stages",
                           "--schedule", "--seed", "--recompute"}) {
    sub->get_option(name)->capture_default_str();
  }
  sub->add_flag("--json", o->json,
                "One JSON object a line: {learning_rates} if they are each parameter's own, {step, steps, loss, "
                "seconds} after each "
                "step (loss is null if it is no number, seconds since the start), {stage, recompute} after the first, "
                "{interrupted, steps}, {saved}, {drew, bubble, conclusion}");
  sub->footer(
      "Example:\n  plumb train gpt.pt2 --data text.bin --loss cross_entropy --lr 1e-3 --steps 200 --microbatches 4 "
      "--stages 2 --save trained.pt2");
  sub->callback([o] {
    if (const int code = train(*o); code != 0) throw ExitCode{code};
  });
}

}  // namespace plumb::cli
