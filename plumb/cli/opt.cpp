// plumb opt: passes of the table, in order, file to file.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/graph/pass.h"

namespace plumb::cli {
namespace {

struct OptArguments {
  std::string file, out, dump;
  std::vector<std::string> passes;
  bool list = false, json = false, time = false;
};

void list_passes(bool json) {
  auto passes = nlohmann::json::array();
  std::string text;
  for (const Pass* pass : all_passes()) {
    auto options = nlohmann::json::array();
    text += pass->name + "\n    " + pass->summary + "\n";
    for (const PassOption& o : pass->options) {
      options.push_back({{"name", o.name}, {"default", o.default_value}, {"summary", o.summary}});
      text += "    " + o.name + "=" + o.default_value + "  " + o.summary + "\n";
    }
    passes.push_back({{"name", pass->name}, {"summary", pass->summary}, {"options", options}});
  }
  write_text(json ? passes.dump(1) : text, "");
}

void opt(const OptArguments& o) {
  if (o.list) return list_passes(o.json);
  if (o.file.empty()) throw UsageError("FILE is missing", "plumb opt FILE --pass=NAME -o OUT, or plumb opt --list");
  if (o.passes.empty()) throw UsageError("--pass is missing", "--pass=NAME; `plumb opt --list` shows them");
  std::vector<PassStep> steps;
  for (const std::string& text : o.passes)
    steps.push_back(used_by("--pass=" + text, [&] { return parse_pass_step(text); }));
  Progress progress(static_cast<int>(steps.size()) + 2, o.json);
  progress.next("reading " + o.file);
  const Loaded loaded = load(o.file);
  check_same_kind(loaded, o.out);
  if (o.json && (o.out.empty() || o.out == "-")) {
    throw UsageError("--json: the graph goes to stdout already", "-o OUT for the graph");
  }
  check_writable({{"-o", o.out}}, {o.file});
  RunPassesOptions run;
  run.check = !loaded.is_text;  // a text's module has no tensors: only its graph is checked
  run.dump = o.dump;
  run.before = [&](const PassStep& step) { progress.next(step.pass->name); };
  run.after = [&](const PassResult& done) {
    char seconds[32] = "";
    if (o.time) std::snprintf(seconds, sizeof seconds, " (%.3f s)", done.seconds);
    progress.say(done.pass + ": " + (done.changed ? "changed" : "nothing to change") + seconds);
    for (const std::string& note : done.notes) progress.say("  " + note);
  };
  const auto results = run_passes(steps, loaded.module(), run);
  progress.next("writing " + o.out);
  save(loaded, o.out);
  say_wrote(progress, o.out);
  progress.finish();
  if (!o.json) return;
  auto report = nlohmann::json::array();
  for (const PassResult& r : results) {
    report.push_back({{"pass", r.pass}, {"changed", r.changed}, {"seconds", r.seconds}, {"notes", r.notes}});
  }
  write_text(report.dump(1), "");
}

}  // namespace

void add_opt(CLI::App& app) {
  auto o = std::make_shared<OptArguments>();
  CLI::App* sub = app.add_subcommand("opt", "Runs passes over a graph, file to file");
  sub->add_option("FILE", o->file, "A .pt2 file or a graph's text");
  sub->add_option("--pass", o->passes, "NAME[,option=value]..., as often as wanted: run in this order")
      ->allow_extra_args(false);
  sub->add_option("-o,--out", o->out, "Where the result goes: .pt2 for a .pt2 file, text for text (default: stdout)");
  sub->add_option("--dump", o->dump, "A folder for the graph's text before the first pass and after every pass");
  sub->add_flag("--time", o->time, "Say how long every pass took");
  sub->add_flag("--list", o->list, "Show the passes and their options");
  sub->add_flag("--json", o->json, "Print what was done (with --list: the table) as JSON");
  sub->footer("Example:\n  plumb opt model.pt2 --pass=dead_code --pass=simulate_format,fwd=E4M3,bwd=E5M2 -o fp8.pt2");
  sub->callback([o] { opt(*o); });
}

}  // namespace plumb::cli
