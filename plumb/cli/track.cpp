// plumb track: the scale of every tensor and gradient in one run.
#include <CLI/CLI.hpp>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/transforms/track_scales.h"

namespace plumb::cli {
namespace {

struct Options {
  std::string file, out;
  std::vector<std::string> inputs;
  bool backward = false, json = false, all = false;
};

void track(const Options& o) {
  const Loaded loaded = load(o.file);
  need_tensors(loaded, o.file);
  std::vector<c10::IValue> inputs = read_inputs(loaded.module(), o.inputs);
  const auto tracked = track_scales(loaded.program.module);
  at::AutoGradMode gradients(o.backward);
  const std::vector<c10::IValue> outputs = tracked->run(std::move(inputs));
  if (o.backward) backward_start(*tracked, outputs).backward();
  ScalesGraph scales = scales_graph(*tracked);
  if (!o.all) scales = prune_non_float_tensors(scales);
  write_text(o.json ? scales.to_json() : scales.to_text(), o.out);
}

}  // namespace

void add_track(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("track", "Measures the scale of every tensor and gradient in one run");
  sub->add_option("FILE", o->file, "A .pt2 file")->required();
  sub->add_option("--input", o->inputs, "[NAME=]FILE.pt or FILE.npy, or a number; one an input, in order if not named")
      ->allow_extra_args(false);
  sub->add_flag("--backward", o->backward,
                "Measure gradients too, from the output named loss or the sum of all outputs");
  sub->add_flag("--all", o->all, "Show also what is no floating-point tensor");
  sub->add_option("-o,--out", o->out, "Write to a file instead of stdout");
  sub->add_flag("--json", o->json, "Print as JSON");
  sub->footer("Example:\n  plumb track model.pt2 --input x.pt --backward");
  sub->callback([o] { track(*o); });
}

}  // namespace plumb::cli
