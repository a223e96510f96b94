// plumb verdict: which number format a model trains in, from the gradients of a few steps.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/training/trainer.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb::cli {
namespace {

struct VerdictArguments {
  FieldTexts texts;
  std::vector<std::string> recipes{"all"};
  int64_t steps = 4;
  std::string html, out;
  bool json = false;
};

// A warm-up is trained before it is measured: with more steps, a verdict takes as long as a training.
constexpr int64_t kMostWarmup = 10000;

// A training of a few steps, nothing of which is kept.
void judge(const VerdictArguments& given) {
  TrainOptions o = read_options("", given.texts);
  if (o.warmup > kMostWarmup) {
    throw UsageError(c10::str("--warmup ", o.warmup, ": so many steps are trained before the last are measured, ",
                              kMostWarmup, " at most"),
                     "a shorter --warmup, or plumb train --verdict for a training that runs anyway");
  }
  if (given.recipes != std::vector<std::string>{"all"}) {
    used_by("--recipes", [&] { std::ranges::for_each(given.recipes, read_recipe); });
  }
  o.verdict = given.recipes;
  o.verdict_steps = given.steps;
  o.verdict_page = given.html;
  o.steps = std::max(verdict_steps(given.steps, o.warmup).back(), o.warmup);
  check_writable({{"-o", given.out}, {"--html", given.html}}, {o.file, o.data, o.targets, o.mask});
  event::Concluded concluded;
  std::string problem;
  Progress progress(static_cast<int>(o.steps) + 2, given.json);
  TrainHooks hooks;
  hooks.phase = [&](const std::string& what) { progress.next(what); };
  hooks.event = [&](const TrainEvent& event) {
    if (const auto* found = std::get_if<event::Concluded>(&event)) concluded = *found;
    if (const auto* found = std::get_if<event::LogProblem>(&event)) problem = found->problem;
    if (const auto* done = std::get_if<event::Stepped>(&event); done && done->step < o.steps)
      progress.next(c10::str("step ", done->step + 1));
  };
  train(o, hooks);
  progress.finish();
  if (concluded.text.empty())
    throw Error(ErrorKind::Numerics, problem, "",
                "other data, another recipe, or a model and a loss that learn from it");
  std::cout << (given.json ? concluded.verdict.dump() + "\n" : concluded.text);
  if (given.out.empty()) return;
  write_text(concluded.verdict.at("file").get<std::string>(), given.out);
  say_wrote(progress, given.out);
}

}  // namespace

void add_verdict(CLI::App& app) {
  auto o = std::make_shared<VerdictArguments>();
  CLI::App* sub = app.add_subcommand(
      "verdict", "In which number formats a .pt2 file's model will train, and what stands in the way");
  for (const char* name : {"file", "data"}) add_field(sub, train_field(name), o->texts)->required();
  for (const char* name :
       {"weights", "data-pattern", "token-type", "targets", "mask", "loss", "ignore-index", "optimizer", "lr",
        "weight-decay", "clip", "warmup", "batch", "microbatches", "seed", "device", "threads"})
    add_field(sub, train_field(name), o->texts);
  sub->add_option("--recipes", o->recipes,
                  "fp16, bf16, fp8, unit-fp8, tensorwise, rowwise, blocks128, mxfp8, nvfp4, mxfp4, any other format, "
                  "FORWARD/BACKWARD, or a recipe file; all: those named here")
      ->delimiter(',');
  sub->add_option("--steps", o->steps, "Measure so many steps, half of them behind --warmup")
      ->check(whole_number(1, 1000))
      ->capture_default_str();
  sub->add_option("--html", o->html, "A page of it");
  sub->add_option("-o,--out", o->out, "A file of the recipe it ends with, for plumb train --formats; - prints it");
  sub->add_flag("--json", o->json,
                "{conclusion, recipes: [{recipe, backward, by_weight, drift, forward, score, verdict, sentence, "
                "last, remedied, file, left, "
                "products: [{product, direction, gain}]}], file, batches, gradients, full_gradients}");
  sub->footer("Example:\n  plumb verdict gpt.pt2 --data text.bin --recipes fp8,mxfp4 -o recipe.toml");
  sub->callback([o] { judge(*o); });
}

}  // namespace plumb::cli
