// plumb scale: unit scaling of a `.pt2` file.
#include <CLI/CLI.hpp>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/transforms/unit_scale.h"

namespace plumb::cli {
namespace {

struct Options {
  std::string file, out;
  bool report = false, json = false, depth = false;
};

void scale(const Options& o) {
  Loaded loaded = load(o.file);
  need_tensors(loaded, o.file);
  check_same_kind(loaded, o.out);
  UnitScaleOptions options;
  if (o.depth) options.tau_rule = TauRule::Depth;
  const auto scaled = unit_scale(loaded.program.module, options);
  const Report& report = scaled->reports.back();
  loaded.program.module = scaled;
  save(loaded, o.out);
  if (o.json) {
    std::cout << report.to_json() << "\n";
  } else if (o.report) {
    std::cout << report.to_text();
  } else {
    std::cout << report.count(ReportKind::Replaced) << " operators replaced, " << report.count(ReportKind::Residual)
              << " residual adds, " << report.count(ReportKind::Weight) << " weights scaled; --report says more\n";
  }
}

}  // namespace

void add_scale(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("scale", "Makes a .pt2 file unit-scaled: operators, residuals and weights");
  sub->add_option("FILE", o->file, "A .pt2 file")->required();
  sub->add_option("-o,--out", o->out, "The .pt2 file to write")->required();
  sub->add_flag("--depth-rule", o->depth, "Weigh residual branches by u-muP's rule for any depth");
  sub->add_flag("--report", o->report, "Say what was done, node by node");
  sub->add_flag("--json", o->json, "The report as JSON");
  sub->footer("Example:\n  plumb scale model.pt2 -o scaled.pt2 --report");
  sub->callback([o] { scale(*o); });
}

}  // namespace plumb::cli
