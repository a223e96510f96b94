// plumb opt: passes of the table, in order, file to file.
#include <CLI/CLI.hpp>
#include <sstream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/graph/pass.h"

namespace plumb::cli {
namespace {

struct OptArguments {
  std::string file, out;
  std::vector<std::string> passes;
  bool list = false, json = false;
};

struct Step {
  const Pass* pass;
  PassOptions options;
};

// "NAME[,option=value]..."; a part without "=" belongs to the value before it ("exclude=a,b").
Step parse_step(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    if (parts.size() > 1 && part.find('=') == std::string::npos) {
      parts.back() += "," + part;
    } else {
      parts.push_back(part);
    }
  }
  Step step{};
  try {
    step.pass = &find_pass(parts.empty() ? "" : parts[0]);
  } catch (const Error& e) {
    throw UsageError("--pass=" + text + ": " + e.message(), e.remedy());
  }
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    const std::string name = parts[i].substr(0, equals);
    std::string known;
    bool found = false;
    for (const PassOption& option : step.pass->options) {
      found = found || option.name == name;
      known += (known.empty() ? "" : ", ") + option.name;
    }
    if (!found || equals == std::string::npos) {
      throw UsageError(
          "--pass=" + text + ": " + (found ? "option '" + name + "' has no value" : "no option '" + name + "'"),
          known.empty() ? "pass " + step.pass->name + " has no options" : "option=value with one of: " + known);
    }
    step.options[name] = parts[i].substr(equals + 1);
  }
  return step;
}

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
  std::vector<Step> steps;
  for (const std::string& text : o.passes) steps.push_back(parse_step(text));
  Progress progress(static_cast<int>(steps.size()) + 2, o.json);
  progress.next("reading " + o.file);
  const Loaded loaded = load(o.file);
  check_same_kind(loaded, o.out);
  if (o.json && (o.out.empty() || o.out == "-")) {
    throw UsageError("--json: the graph goes to stdout already", "-o OUT for the graph");
  }
  check_writable("-o", o.out);
  auto report = nlohmann::json::array();
  for (const Step& step : steps) {
    progress.next(step.pass->name);
    std::vector<std::string> notes;
    // A text's module has no tensors, so only its graph is checked.
    const bool changed = run_pass(*step.pass, loaded.module(), step.options, &notes, !loaded.is_text);
    lint(loaded.module().graph());
    report.push_back({{"pass", step.pass->name}, {"changed", changed}, {"notes", notes}});
    progress.say(step.pass->name + ": " + (changed ? "changed" : "nothing to change"));
    for (const std::string& note : notes) progress.say("  " + note);
  }
  progress.next("writing " + o.out);
  save(loaded, o.out);
  progress.finish();
  if (o.json) write_text(report.dump(1), "");
}

}  // namespace

void add_opt(CLI::App& app) {
  auto o = std::make_shared<OptArguments>();
  CLI::App* sub = app.add_subcommand("opt", "Runs passes over a graph, file to file");
  sub->add_option("FILE", o->file, "A .pt2 file or a graph's text");
  sub->add_option("--pass", o->passes, "NAME[,option=value]..., as often as wanted: run in this order")
      ->allow_extra_args(false);
  sub->add_option("-o,--out", o->out, "Where the result goes: .pt2 for a .pt2 file, text for text (default: stdout)");
  sub->add_flag("--list", o->list, "Show the passes and their options");
  sub->add_flag("--json", o->json, "Print what was done (with --list: the table) as JSON");
  sub->footer("Example:\n  plumb opt model.pt2 --pass=dead_code --pass=simulate_format,fwd=E4M3,bwd=E5M2 -o fp8.pt2");
  sub->callback([o] { opt(*o); });
}

}  // namespace plumb::cli
