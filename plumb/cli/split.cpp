// plumb split: a `.pt2` file into one file a stage, and what flows between them.
#include <CLI/CLI.hpp>
#include <filesystem>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/partition/describe_cut.h"
#include "plumb/training/cut.h"

namespace plumb::cli {
namespace {

struct SplitArguments {
  std::string file, out;
  int stages = 0;
  FieldTexts texts;
  bool json = false, report = false;
};

std::string stage_file(int stage) { return c10::str("stage", stage, ".pt2"); }

void split(const SplitArguments& o) {
  const TrainOptions cuts = read_options("", o.texts);
  if (o.stages == 1 && !cuts.at.empty()) {
    throw UsageError("--at: one stage has no cuts", "--stages " + std::to_string(cuts.at.size() + 1));
  }
  if (o.out.empty() && !o.report) {
    throw UsageError("-o is missing", "-o FOLDER for the stages, or --report to look at the cut");
  }
  std::error_code failed;
  if (std::filesystem::exists(o.out, failed) && !std::filesystem::is_directory(o.out, failed)) {
    throw Error(ErrorKind::CannotWrite, "-o " + o.out + ": is a file", "", "give -o a folder");
  }
  Progress progress(2 + std::max(o.stages, static_cast<int>(cuts.at.size()) + 1), o.json);
  progress.next("reading " + o.file);
  const Loaded loaded = load_with_tensors(o.file);
  progress.next("cutting " + o.file);
  const auto pipe =
      cut(loaded.module(), o.stages, {cuts.at, cuts.transmit, {}}, "--stages " + std::to_string(o.stages));
  if (o.report) {
    progress.finish();
    std::string text = describe_cut(*pipe).report();
    for (const std::string& note : pipe->notes()) text += "note: " + note + "\n";
    write_text(text, "");
  }
  if (o.out.empty()) return;
  std::filesystem::create_directories(o.out, failed);
  const std::filesystem::path folder = o.out, manifest_file = folder / "manifest.json";
  if (failed) {
    throw Error(ErrorKind::CannotWrite, "-o " + o.out + ": cannot be made: " + failed.message(), "",
                "give -o a folder that can be written to");
  }
  check_writable({{"-o", manifest_file.string()}}, {o.file});
  for (int s = 0; s < pipe->num_stages(); ++s) check_writable({{"-o", (folder / stage_file(s)).string()}}, {o.file});
  // That of an earlier run does not describe the files from here on.
  std::filesystem::remove(manifest_file, failed);
  nlohmann::json manifest = {{"table", nlohmann::json::parse(pipe->table().to_json())},
                             {"notes", pipe->notes()},
                             {"stages", nlohmann::json::array()}};
  Table table{{"stage", "file", "operators", "parameters", "inputs", "outputs"}, {}};
  for (int s = 0; s < pipe->num_stages(); ++s) {
    const GraphModule& stage = *pipe->stage(s);
    const std::string name = stage_file(s);
    progress.next("writing " + name);
    save_pt2(stage, (folder / name).string());
    size_t operators = 0;
    for (const Node* node : stage.graph().nodes()) operators += node->is_call();
    std::vector<std::string> in, out;
    for (const StageInputPort& p : pipe->stage_inputs(s)) in.push_back(p.name);
    for (const StageOutputPort& p : pipe->stage_outputs(s)) out.push_back(p.name);
    const auto parameters = stage.state().names(AttrKind::Parameter);
    manifest["stages"].push_back(
        {{"file", name}, {"operators", operators}, {"parameters", parameters}, {"inputs", in}, {"outputs", out}});
    table.rows.push_back(
        {std::to_string(s), name, std::to_string(operators), std::to_string(parameters.size()), join(in), join(out)});
  }
  // The manifest last: where it is, the stages are whole.
  write_text(manifest.dump(1) + "\n", manifest_file.string());
  progress.finish();
  std::string text = columns(std::move(table));
  for (const std::string& note : pipe->notes()) text += "note: " + note + "\n";
  write_text(o.json ? manifest.dump(1) : text, "");
}

}  // namespace

void add_split(CLI::App& app) {
  auto o = std::make_shared<SplitArguments>();
  CLI::App* sub = app.add_subcommand("split", "Cuts a .pt2 file into stage files and a manifest");
  sub->add_option("FILE", o->file, "A .pt2 file")->required();
  sub->add_option("--stages", o->stages, "How many; without --at or marks the cuts are balanced")
      ->check(whole_number(1, 1024));
  for (const char* name : {"at", "transmit"}) add_field(sub, train_field(name), o->texts);
  sub->add_option("-o,--out", o->out, "The folder for stage0.pt2, stage1.pt2, ... and manifest.json");
  auto* json = sub->add_flag("--json", o->json, "Print the manifest");
  sub->add_flag("--report", o->report, "Show what each stage costs; without -o nothing is written")->excludes(json);
  sub->footer("Example:\n  plumb split model.pt2 --stages 4 --report\n  plumb split model.pt2 --stages 2 -o stages");
  sub->callback([o] { split(*o); });
}

}  // namespace plumb::cli
