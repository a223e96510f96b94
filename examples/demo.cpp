// `make demo`: a byte-level GPT on real text in FP32, in plain FP8, in unit-scaled FP8, the last one cut in two stages
// over two processes, and once more with FP8 that is multiplied and sent. Prints a table and writes OUT/report.html.
//
//   plumb_demo [--text FILE|FOLDER] [--out FOLDER] [--steps N]
//   plumb_demo --only fp32|plain|scaled --lr RATE      one run, its losses as JSON: for the sweep of learning rates
#include <CLI/CLI.hpp>
#include <cstdio>
#include <future>
#include <iostream>

#include "demo.h"
#include "plumb/core/error.h"
#include "plumb/core/freed_memory.h"

namespace {

// The sources of the machine's own Python: on every machine, no download.
std::string standard_library() {
  std::string path;
  if (FILE* pipe = popen("python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"), end=\"\")'", "r")) {
    char buffer[4096];
    size_t n;
    while ((n = fread(buffer, 1, sizeof buffer, pipe)) > 0) path.append(buffer, n);
    pclose(pipe);
  }
  if (path.empty()) throw std::runtime_error("no Python found whose sources could be the text: give --text FILE");
  return path;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace example;
  plumb::keep_freed_memory();
  DemoOptions options;
  bool is_worker = false, is_real_worker = false, small = false;
  std::string only;
  double lr = 0;
  CLI::App app("Trains a byte-level GPT in FP32, FP8 and unit-scaled FP8, and over two pipeline processes.");
  app.add_option("--text", options.text, "A file or folder of text; default: Python's standard library");
  app.add_option("--out", options.out, "Where the report goes")->capture_default_str();
  app.add_option("--steps", options.steps, "Training steps")->check(CLI::Range(2, 1'000'000))->capture_default_str();
  app.add_option("--only", only, "One run: fp32, plain or scaled")->check(CLI::IsMember({"fp32", "plain", "scaled"}));
  app.add_option("--lr", lr, "The learning rate of --only");
  app.add_option("--tau-attention", options.tau_attention, "Weight of attention in unit-scaled residual adds")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of weights and batches")->capture_default_str();
  app.add_flag("--small", small, "A tiny model, to see that everything runs");
  app.add_flag("--worker", is_worker, "")->group("");
  app.add_flag("--real-worker", is_real_worker, "")->group("");
  CLI11_PARSE(app, argc, argv);
  // One thread a process: two processes on two cores, and the same sums everywhere.
  at::set_num_threads(1);
  try {
    if (small) options.model = {.width = 32, .layers = 2, .heads = 2, .context = 16};
    if (options.text.empty()) options.text = standard_library();
    std::filesystem::create_directories(options.out);
    if (is_worker || is_real_worker) return worker(options, is_real_worker);
    if (!only.empty()) {
      const Variant variant = only == "fp32" ? Variant::FP32 : only == "plain" ? Variant::PlainFP8 : Variant::ScaledFP8;
      const double standard = only == "fp32" ? options.lr_fp32 : only == "plain" ? options.lr_plain : options.lr_scaled;
      const RunResult run = train(options, variant, lr > 0 ? lr : standard);
      std::printf("{\"run\": \"%s\", \"lr\": %g, \"tail\": %.6f, \"seconds\": %.1f}\n", run.name.c_str(), run.lr,
                  run.tail(), run.seconds);
      return 0;
    }
    std::cerr << "text: " << options.text << "\n";
    DemoResult result;
    // Three at once: a thread each.
    const auto beside = [&](Variant variant, double rate) {
      return std::async(std::launch::async, [&options, variant, rate] { return train(options, variant, rate, false); });
    };
    auto plain = beside(Variant::PlainFP8, options.lr_plain), scaled = beside(Variant::ScaledFP8, options.lr_scaled);
    result.runs.push_back(train(options, Variant::FP32, options.lr_fp32));
    result.runs.push_back(plain.get());
    result.runs.push_back(scaled.get());
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    result.runs.push_back(train_in_processes(options, arguments, /*real=*/false, result.timeline));
    std::vector<plumb::TimelineEvent> real;
    result.runs.push_back(train_in_processes(options, arguments, /*real=*/true, real));
    const auto sent = [](const std::vector<plumb::TimelineEvent>& events) {
      double bytes = 0;
      for (const auto& e : events) bytes += static_cast<double>(e.sent);
      return bytes;
    };
    result.bytes_sent = sent(real) / sent(result.timeline);
    result.equal = result.runs[2].losses == result.runs[3].losses;
    print_table(result);
    write_report(options, result);
    std::cout << "\nreport: " << options.out << "/report.html\n";
    return result.equal ? 0 : 1;
  } catch (const plumb::Error& e) {
    std::cerr << "plumb_demo: " << e.what() << "\n";
  } catch (const c10::Error& e) {
    std::cerr << "plumb_demo: " << e.what_without_backtrace() << "\n";
  } catch (const std::exception& e) {
    std::cerr << "plumb_demo: " << e.what() << "\n";
  }
  return 1;
}
