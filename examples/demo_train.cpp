#include <unistd.h>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <mutex>
#include <optional>

#include "demo.h"
#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/partition/split.h"
#include "plumb/pipeline/launch/launch.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/schedule/generators.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/formats/use_fp8.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/track_scales.h"

namespace example {
namespace {

// Returns the formats of hardware: the standard E4M3 and E5M2, rounded to the nearest.
plumb::SimulateFormatOptions hardware_fp8() {
  plumb::SimulateFormatOptions options;
  options.fwd = "e4m3fn-RN";
  options.bwd = "e5m2-RN";
  return options;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// AdamW whose rate follows the schedule.
class Optimizer {
 public:
  Optimizer(std::vector<at::Tensor> parameters, double lr)
      : adam_(std::move(parameters), torch::optim::AdamWOptions(lr)), lr_(lr) {}
  void zero_grad() { adam_.zero_grad(); }
  void step(double factor) {
    for (auto& group : adam_.param_groups()) group.options().set_lr(lr_ * factor);
    adam_.step();
  }

 private:
  torch::optim::AdamW adam_;
  double lr_;
};

void progress(const std::string& name, int step, int steps, double loss) {
  if (isatty(fileno(stderr))) {
    std::fprintf(stderr, "\r%-28s step %4d/%d  loss %.3f ", name.c_str(), step + 1, steps, loss);
    if (step + 1 == steps) std::fputc('\n', stderr);
  } else if ((step + 1) % 100 == 0 || step + 1 == steps) {
    std::fprintf(stderr, "%-28s step %4d/%d  loss %.3f\n", name.c_str(), step + 1, steps, loss);
  }
}

std::string pipeline_name(bool real) { return real ? name_of(Variant::RealFP8) : "the same in two processes"; }

std::string file_of(const DemoOptions& o, const char* name) { return o.out + "/" + name; }

}  // namespace

std::string name_of(Variant variant) {
  switch (variant) {
    case Variant::FP32: return "FP32";
    case Variant::PlainFP8: return "plain FP8";
    case Variant::ScaledFP8: return "unit-scaled FP8";
    case Variant::RealFP8: return "FP8 for real, two processes";
  }
  return "";
}

double RunResult::tail() const {
  const size_t n = std::max<size_t>(1, losses.size() / 10);
  double sum = 0;
  for (size_t i = losses.size() - n; i < losses.size(); ++i) sum += losses[i];
  return sum / static_cast<double>(n);
}

double schedule(int step, int steps) {
  const int warm = std::max(1, steps / 10);
  if (step < warm) return static_cast<double>(step + 1) / warm;
  return 0.5 * (1 + std::cos(M_PI * (step - warm) / std::max(1, steps - warm)));
}

std::shared_ptr<plumb::GraphModule> make_module(const DemoOptions& o, Variant variant, int rows) {
  static std::mutex one_generator;
  const std::lock_guard lock(one_generator);
  torch::manual_seed(o.seed);
  GPT gpt(o.model);
  plumb::CaptureOptions capture_options;
  capture_options.input_names = {"ids", "targets"};
  at::Tensor ids = at::zeros({rows, o.model.context}, at::kLong);
  auto graph = plumb::capture(capture_options, gpt, ids, ids);
  if (variant == Variant::FP32) return graph;
  if (variant == Variant::PlainFP8) return plumb::simulate_fp8(graph, hardware_fp8());
  plumb::UnitScaleOptions scale;
  scale.tau_attention = o.tau_attention;
  const auto scaled = plumb::unit_scale(graph, scale);
  if (variant == Variant::RealFP8) return plumb::use_fp8(scaled);
  return plumb::simulate_fp8(scaled, hardware_fp8());
}

TextBatches make_batches(const DemoOptions& o) {
  return TextBatches(read_text(o.text), o.batch, o.model.context, o.seed);
}

RunResult train(const DemoOptions& o, Variant variant, double lr, bool shown) {
  const auto start = std::chrono::steady_clock::now();
  RunResult result{name_of(variant), lr, 0, {}, {}};
  std::optional<plumb::Verdict> verdict;  // no bit of the run depends on it
  auto module = make_module(o, variant, o.batch / o.microbatches);
  auto batches = make_batches(o);
  auto parameters = module->parameters();
  Optimizer optimizer(parameters, lr);
  auto judged = plumb::verdict_steps(4, o.steps / 10);
  if (variant == Variant::FP32) verdict.emplace(*module, plumb::VerdictOptions{.recipes = {"fp8", "unit-fp8"}});
  for (int step = 0; step < o.steps; ++step) {
    optimizer.zero_grad();
    const Batch batch = batches.next();
    const auto ids = batch.ids.chunk(o.microbatches), targets = batch.targets.chunk(o.microbatches);
    if (verdict && !judged.empty() && judged.front() == step + 1) {
      plumb::Verdict::Parts parts;
      for (size_t m = 0; m < ids.size(); ++m)
        parts.push_back([&, m](plumb::GraphModule& graph) { return graph(ids[m], targets[m]) / o.microbatches; });
      verdict->measure(parts);
      judged.erase(judged.begin());
      if (judged.empty()) result.verdict = verdict->conclude(parts);
    }
    double loss = 0;
    for (int m = 0; m < o.microbatches; ++m) {
      at::Tensor part = (*module)(ids[static_cast<size_t>(m)], targets[static_cast<size_t>(m)]);
      part.backward();
      loss += part.item<double>();
    }
    for (at::Tensor& p : parameters) {
      if (p.grad().defined()) p.mutable_grad().div_(o.microbatches);
    }
    optimizer.step(schedule(step, o.steps));
    result.losses.push_back(loss / o.microbatches);
    if (shown) progress(result.name, step, o.steps, result.losses.back());
  }
  // One batch more, measured: the model as it has become.
  auto tracked = plumb::track_scales(module, {.histogram = true});
  const Batch batch = batches.next();
  const int rows = o.batch / o.microbatches;
  (*tracked)(batch.ids.narrow(0, 0, rows), batch.targets.narrow(0, 0, rows)).backward();
  result.scales = plumb::scales_graph(*tracked);
  result.seconds = seconds_since(start);
  return result;
}

int worker(const DemoOptions& o, bool real) {
  const std::string name = pipeline_name(real);
  auto group = plumb::make_group_from_environment();
  auto module = make_module(o, real ? Variant::RealFP8 : Variant::ScaledFP8, o.batch / o.microbatches);
  // In the middle of the blocks: before the first operator that uses a parameter of that block.
  plumb::SplitOptions cut;
  for (int s = 1; s < o.stages; ++s) {
    cut.points.emplace_back("blocks." + std::to_string(o.model.layers * s / o.stages), plumb::SplitPoint::Beginning);
  }
  if (real) cut.wire.formats = {"e4m3fn", "e5m2"};
  auto pipe = plumb::pipeline(*module, cut);
  auto table = plumb::make_schedule("1F1B", o.stages, o.microbatches, 1);
  auto stages = plumb::stages_of_rank(*pipe, table, group.rank());
  plumb::PipelineOptions options;
  options.record_timeline = true;
  options.return_outputs = false;
  std::vector<at::Tensor> parameters;
  for (const auto& [index, stage] : stages) {
    for (const auto& p : stage->parameters()) parameters.push_back(p.tensor);
  }
  plumb::Pipeline pipeline(pipe->table(), table, stages, group, options);
  Optimizer optimizer(parameters, o.lr_scaled);
  auto batches = make_batches(o);
  std::vector<double> losses;
  for (int step = 0; step < o.steps; ++step) {
    optimizer.zero_grad();
    const Batch batch = batches.next();
    auto result = pipeline.step({batch.ids, batch.targets});
    optimizer.step(schedule(step, o.steps));
    double loss = 0;
    for (const at::Tensor& part : result.losses) loss += part.item<double>();
    losses.push_back(loss / o.microbatches);
    if (!result.losses.empty()) progress(name, step, o.steps, losses.back());
  }
  const auto timeline = pipeline.gather_timeline();
  if (group.rank() == 0) std::ofstream(file_of(o, "timeline.txt")) << plumb::to_text(timeline);
  if (group.rank() == o.stages - 1) {
    std::ofstream out(file_of(o, "pipeline_losses.bin"), std::ios::binary);
    out.write(reinterpret_cast<const char*>(losses.data()),
              static_cast<std::streamsize>(losses.size() * sizeof(double)));
  }
  return 0;
}

RunResult train_in_processes(const DemoOptions& o, const std::vector<std::string>& arguments, bool real,
                             std::vector<plumb::TimelineEvent>& timeline) {
  const auto start = std::chrono::steady_clock::now();
  plumb::LaunchOptions launch;
  launch.num_processes = o.stages;
  launch.arguments = arguments;
  launch.arguments.push_back(real ? "--real-worker" : "--worker");
  const auto ended = plumb::launch_local(launch);
  if (ended.exit_code() != 0) {
    throw plumb::Error(plumb::ErrorKind::Communication,
                       "process " + std::to_string(ended.first_failed) + " of the pipeline failed");
  }
  RunResult result{pipeline_name(real), o.lr_scaled, seconds_since(start), {}, {}};
  std::ifstream in(file_of(o, "pipeline_losses.bin"), std::ios::binary);
  std::vector<char> bytes(std::istreambuf_iterator<char>(in), {});
  result.losses.resize(bytes.size() / sizeof(double));
  std::memcpy(result.losses.data(), bytes.data(), result.losses.size() * sizeof(double));
  std::ifstream text(file_of(o, "timeline.txt"));
  timeline = plumb::parse_timeline(std::string(std::istreambuf_iterator<char>(text), {}));
  return result;
}

}  // namespace example
