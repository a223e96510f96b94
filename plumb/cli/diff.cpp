// plumb diff: where two runs part.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plumb/analysis/diff_page.h"
#include "plumb/checkpoint/checkpoint.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/partition/move.h"
#include "plumb/recording/module_diff.h"
#include "plumb/training/stages.h"

namespace plumb::cli {
namespace {

struct DiffArguments {
  std::string a, b, html, device = "cpu";
  std::vector<std::string> inputs, replays;
  double tolerance = 0;
  bool json = false;
};

// The newest checkpoint of a run's folder, or the checkpoint itself.
Checkpoint checkpoint_of(const std::string& folder) {
  if (std::filesystem::exists(std::filesystem::path(folder) / "checkpoint.json")) return Checkpoint::open(folder);
  auto newest = Checkpoint::newest(folder);
  if (!newest)
    throw UsageError(folder + ": has no checkpoint", "a checkpoint's folder, or that of a run's checkpoints");
  return *std::move(newest);
}

DiffReport diff_files(const DiffArguments& o, const DiffNames& names, Progress& progress) {
  Model a = open_model({o.a, "", o.inputs}, progress);
  const Loaded b = load_with_values(o.b, "");
  progress.next("running both");
  if (o.device != "cpu") move_module(b.module(), device_of(o.device, 0), o.b);
  ModuleDiffOptions options{.tolerance = o.tolerance, .names = names};
  options.loss = [&](const std::vector<c10::IValue>& outputs) { return loss_or_sum(a.module(), outputs); };
  return diff(a.module(), b.module(), a.inputs, options);
}

void run_diff(const DiffArguments& o) {
  const bool files = is_pt2(o.a) && is_pt2(o.b);
  std::error_code failed;
  const bool folders = std::filesystem::is_directory(o.a, failed) && std::filesystem::is_directory(o.b, failed);
  const bool folder = std::filesystem::is_directory(o.a, failed) || std::filesystem::is_directory(o.b, failed);
  if (is_pt2(o.a) != is_pt2(o.b) || folder != folders) {
    // The reader says what is wrong with a path that is neither, that there is no such file for one.
    for (const std::string& path : {o.a, o.b})
      if (!is_pt2(path) && !std::filesystem::is_directory(path, failed)) read_history(path);
    throw UsageError(o.a + " and " + o.b + ": are of two kinds", "two histories, two checkpoints or two .pt2 files");
  }
  if (!files && !o.inputs.empty())
    throw UsageError("--input: only for two .pt2 files", "plumb diff A.pt2 B.pt2 --input x.pt");
  if (!files && (o.tolerance != 0 || o.device != "cpu"))
    throw UsageError("--tolerance, --device: only for two .pt2 files", "plumb diff A.pt2 B.pt2 --input x.pt");
  if (!o.replays.empty() && (o.replays.size() != 2 || files || folders))
    throw UsageError("--replays: takes the histories of both runs' step done again", "--replays A_AGAIN B_AGAIN");
  std::vector<std::string> inputs = {o.a, o.b};
  for (const auto& more : {o.inputs, o.replays}) inputs.insert(inputs.end(), more.begin(), more.end());
  check_writable({{"--html", o.html}}, inputs);
  Progress progress(4, o.json);
  DiffNames names{o.a, o.b};
  if (names.a == names.b) names.b += " on " + o.device;
  DiffReport report;
  std::string more;
  if (files) {
    report = diff_files(o, names, progress);
  } else if (folders) {
    report = diff(checkpoint_of(o.a).read_all(), checkpoint_of(o.b).read_all(), names);
  } else {
    progress.next("reading " + o.a);
    const History a = read_history(o.a), b = read_history(o.b);
    report = diff(a, b, names);
    if (!o.replays.empty()) {
      more = conclude_replays(a, b, read_history(o.replays[0]), read_history(o.replays[1]), names);
    } else if (report.first && report.first->kind > DiffKind::Gradient) {
      more = c10::str("To see where in step ", *report.first->step, ": plumb train ... --replay ", *report.first->step,
                      " --hashes FILE for both runs, then plumb diff of these files.");
    }
  }
  progress.finish();
  if (o.json) {
    auto document = report.to_json();
    if (!o.replays.empty()) document["replays"] = more;
    std::cout << document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else {
    std::cout << report.to_text() << (more.empty() ? "" : more + "\n");
  }
  if (o.html.empty()) return;
  diff_page(report, more).write(o.html);
  say_wrote(progress, o.html);
}

}  // namespace

void add_diff(CLI::App& app) {
  auto o = std::make_shared<DiffArguments>();
  CLI::App* sub = app.add_subcommand("diff", "Names the first tensor in which two runs differ");
  sub->add_option("A", o->a, "A history with hashes, a checkpoint's folder, or a .pt2 file")->required();
  sub->add_option("B", o->b, "Another one of the same kind")->required();
  sub->add_option("--input", o->inputs, "Input of two .pt2 files, as for plumb run");
  sub->add_option("--device", o->device, "Where the second .pt2 file runs");
  sub->add_option("--tolerance", o->tolerance, "Relative differences up to this one count as none, between .pt2 files")
      ->check(number_within(0, 1e300));
  sub->add_option("--replays", o->replays,
                  "Histories of one step done again by both runs: says which of them was wrong")
      ->expected(2);
  sub->add_option("--html", o->html, "An HTML page, with the graph in colors");
  sub->add_flag("--json", o->json, "Print as JSON");
  sub->footer(
      "Example:\n  plumb train gpt.pt2 --data text.bin --threads 1 --hashes a.history\n  plumb train gpt.pt2 --data "
      "text.bin --threads 1 --stages 2 --hashes b.history\n  plumb diff a.history b.history");
  sub->callback([o] { run_diff(*o); });
}

}  // namespace plumb::cli
