// Parts of the demo: five training runs of one model on the same bytes, and a page about them.
#pragma once

#include <string>
#include <vector>

#include "gpt.h"
#include "plumb/graph/graph_module.h"
#include "plumb/pipeline/runtime/timeline.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/scales_graph.h"
#include "plumb/transforms/verdict/verdict.h"
#include "text_data.h"

namespace example {

struct DemoOptions {
  std::string text;  // file or folder
  std::string out = "demo";
  GPTOptions model;
  int steps = 300, batch = 16, microbatches = 4, stages = 2;
  uint64_t seed = 1;
  // Best of a sweep: examples/learning_rates.py.
  double lr_fp32 = 1e-2, lr_plain = 3e-3, lr_scaled = 7e-2;
  double tau_attention = plumb::UnitScaleOptions().tau_attention;
};

enum class Variant { FP32, PlainFP8, ScaledFP8, RealFP8 };
std::string name_of(Variant variant);

struct RunResult {
  std::string name;
  double lr = 0, seconds = 0;
  std::vector<double> losses;  // nats a byte, by step
  plumb::ScalesGraph scales;   // measured on one batch more, after training; empty for the pipeline
  // The formats in which the model will train, from four steps of the FP32 run; empty for other runs.
  plumb::VerdictReport verdict = {};
  double tail() const;  // mean of the last tenth of the steps, 30 of 300
};

// Warm-up over the first tenth, then a cosine to zero: the factor on the learning rate.
double schedule(int step, int steps);

// Returns the variant's graph for batches of `rows`, with the same initial weights for every caller.
std::shared_ptr<plumb::GraphModule> make_module(const DemoOptions& options, Variant variant, int rows);
TextBatches make_batches(const DemoOptions& options);

// In this process. The batch goes through in `microbatches` parts whose gradients are accumulated. May run in several
// threads at once; `shown`: says how far it is.
RunResult train(const DemoOptions& options, Variant variant, double lr, bool shown = true);

// The unit-scaled FP8 run again, over `stages` local processes that this program starts as "--worker". `real`: FP8 is
// multiplied, and travels between the stages, as a user of FP8 units has it.
RunResult train_in_processes(const DemoOptions& options, const std::vector<std::string>& arguments, bool real,
                             std::vector<plumb::TimelineEvent>& timeline);
int worker(const DemoOptions& options, bool real);

struct DemoResult {
  // FP32, plain FP8, unit-scaled FP8, the same over two processes, FP8 for real over two processes
  std::vector<RunResult> runs;
  std::vector<plumb::TimelineEvent> timeline;  // events of the fourth run
  double bytes_sent = 1;                       // bytes of the fifth run, as a share of the fourth's
  bool equal = false;                          // the third and the fourth, loss by loss
};
// The table, and what it shows; then demo/report.html.
void print_table(const DemoResult& result);
std::vector<std::string> findings(const DemoResult& result);
void write_report(const DemoOptions& options, const DemoResult& result);

}  // namespace example
