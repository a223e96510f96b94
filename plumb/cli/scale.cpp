// plumb scale: unit scaling of a `.pt2` file, and the way back.
#include <CLI/CLI.hpp>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/html_report.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/transforms/fold/fold.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb::cli {
namespace {

struct ScaleArguments {
  std::string file, weights, out, html;
  bool report = false, json = false, depth = false, fold = false, preserve = false;
  UnitScaleOptions scaling;
  std::vector<std::string> replace;
};

std::string counts(const Report& report, bool folded) {
  auto count = [&](ReportKind kind, const char* what) { return std::to_string(report.count(kind)) + what; };
  return count(ReportKind::Replaced, " operators replaced, ") +
         (folded ? count(ReportKind::Folded, " parameters divided, ") +
                       count(ReportKind::Remains, " factors left as multiplications")
                 : count(ReportKind::Residual, " residual adds, ") + count(ReportKind::Weight, " weights scaled"));
}

// "aten::gelu=aten::silu"
Replacement replacement(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string::npos || equals + 1 == text.size()) {
    throw UsageError("--replace " + text + ": is not OLD=NEW", "--replace aten::gelu=aten::silu");
  }
  return {text.substr(0, equals), text.substr(equals + 1), nullptr};
}

void scale(const ScaleArguments& o) {
  if (!is_pt2(o.out)) throw UsageError("-o " + o.out + ": is no .pt2 name", "-o OUT.pt2");
  check_writable({{"-o", o.out}, {"--html", o.html}}, {o.file, o.weights});
  Progress progress(3, o.json);
  progress.next("reading " + o.file);
  Loaded loaded = load_with_values(o.file, o.weights);
  progress.next((o.fold ? "folding " : "scaling ") + o.file);
  UnitScaleOptions options = o.scaling;
  for (const std::string& text : o.replace) options.replace.push_back(replacement(text));
  if (o.depth) options.tau_rule = TauRule::Depth;
  const auto scaled = o.fold       ? fold(loaded.program.module)
                      : o.preserve ? unit_scale_preserving(loaded.program.module, options)
                                   : unit_scale(loaded.program.module, options);
  const Report& report = scaled->reports.back();
  loaded.program.module = scaled;
  progress.next("writing " + o.out);
  save(loaded, o.out);
  say_wrote(progress, o.out);
  if (!o.html.empty()) {
    HtmlReport page((o.fold ? "Folding of " : "Unit scaling of ") + o.file);
    page.section("What was done").prose(o.fold ? counts(report, true) + "." : conclusion(report)).add(table_of(report));
    write_text(page.html(), o.html);
    say_wrote(progress, o.html);
  }
  progress.finish();
  write_text(o.json     ? report.to_json()
             : o.report ? report.to_text()
                        : counts(report, o.fold) + "; --report says more",
             "");
}

}  // namespace

void add_scale(CLI::App& app) {
  auto o = std::make_shared<ScaleArguments>();
  CLI::App* sub = app.add_subcommand("scale", "Makes a .pt2 file unit-scaled: operators, residuals and weights");
  sub->add_option("FILE", o->file, "A .pt2 file")->required();
  sub->add_option("-o,--out", o->out, "The .pt2 file to write")->required();
  add_weights_option(sub, o->weights);
  CLI::Option* depth = sub->add_flag("--depth-rule", o->depth, "Weigh residual branches by u-muP's rule for any depth");
  sub->add_flag("--fold", o->fold,
                "The way back: FILE is unit-scaled, and OUT computes the same with torch's operators alone. Factors go "
                "into parameters, or stay as multiplications")
      ->excludes(depth);
  sub->add_flag("--preserve", o->preserve,
                "Keep the function that FILE computes: weights take the factors instead of starting anew")
      ->excludes("--fold");
  sub->add_option("--tau-attention", o->scaling.tau_attention, "Weight of residual branches with attention")
      ->check(positive_number)
      ->capture_default_str();
  sub->add_option("--tau-mlp", o->scaling.tau_mlp, "Weight of other residual branches")
      ->check(positive_number)
      ->capture_default_str();
  sub->add_option("--residual-mult", o->scaling.residual_mult, "With --depth-rule: weight of all branches together")
      ->check(positive_number);
  sub->add_option("--residual-attn-ratio", o->scaling.residual_attn_ratio,
                  "With --depth-rule: attention's weight over the others'")
      ->check(positive_number);
  sub->add_option("--replace", o->replace, "OLD=NEW, operators that are replaced first; as often as wanted")
      ->allow_extra_args(false);
  sub->add_flag("--report", o->report, "Say what was done, node by node");
  sub->add_option("--html", o->html, "The report as a page");
  sub->add_flag("--json", o->json, "The report as JSON");
  sub->footer(
      "Examples:\n  plumb scale model.pt2 -o scaled.pt2 --report\n  plumb scale --fold trained.pt2 -o plain.pt2");
  sub->callback([o] { scale(*o); });
}

}  // namespace plumb::cli
