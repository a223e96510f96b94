// Cases of pipeline_bench.py: the two halves of a stage's backward, the runtime's own cost, and a GPT trained over
// processes. A library that the script's processes load, so that torch's own pipelining is measured in the same run.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/profiler.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include "benchmarks/measure.h"
#include "examples/gpt.h"
#include "plumb/autograd/stage_backward.h"
#include "plumb/core/freed_memory.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/simulate.h"

namespace {

using plumb::Tensors;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Shape {
  int64_t width, heads, sequence, vocabulary, layers;
};

// Layers [first, last) of the GPT, with its embedding and its head where they belong. All weights of the whole model
// are drawn, so that every stage is the same however the model is cut; those of other stages go.
std::shared_ptr<plumb::StageFunction> gpt_stage(const Shape& shape, int64_t first, int64_t last) {
  at::manual_seed(1);
  example::GPT model(example::GPTOptions{shape.vocabulary, shape.width, shape.layers, shape.heads, shape.sequence});
  std::vector<plumb::NamedTensor> named;
  auto take = [&](const std::string& prefix, const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) named.push_back({prefix + item.key(), item.value()});
  };
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps;
  if (first == 0) {
    take("tok.", *model->tok), take("pos.", *model->pos);
    steps.emplace_back([tok = model->tok, pos = model->pos](const at::Tensor& ids) mutable {
      return tok(ids) + pos(at::arange(ids.size(1), at::kLong));
    });
  }
  for (int64_t i = first; i < last; ++i) {
    const auto block = model->blocks->ptr<example::BlockImpl>(i);
    take("blocks." + std::to_string(i) + ".", *block);
    steps.emplace_back([block](const at::Tensor& x) { return block->forward(x); });
  }
  if (last == shape.layers) {
    take("ln.", *model->ln), take("head.", *model->head);
    steps.emplace_back([ln = model->ln, head = model->head](const at::Tensor& x) mutable { return head(ln(x)); });
  }
  auto forward = [steps](const Tensors& in) -> Tensors {
    at::Tensor x = in[0];
    for (const auto& step : steps) x = step(x);
    return {x};
  };
  return std::make_shared<plumb::LambdaStage>(forward, named);
}

at::Tensor cross_entropy(const Tensors& out, const Tensors& target) {
  return at::cross_entropy_loss(out[0].reshape({-1, out[0].size(-1)}), target[0].reshape({-1}));
}

std::vector<double> sorted(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values;
}

void complain(const std::exception& e) { std::fprintf(stderr, "%s\n", e.what()); }

}  // namespace

extern "C" {

// out: seconds of the whole backward (best), of both halves together (best), the median of their paired ratios, the
// input half's share of the halves, and 1 if all gradients were equal bit for bit.
int stage_backward_halves(int64_t width, int64_t heads, int64_t batch, int64_t sequence, int64_t layers, int64_t rounds,
                          double* out) try {
  plumb::keep_freed_memory();
  torch::nn::Sequential stack;
  for (int64_t i = 0; i < layers; ++i) stack->push_back(example::Block(width, heads));
  const Tensors parameters = stack->parameters();
  const auto input = at::randn({batch, sequence, width}), gradient = at::randn({batch, sequence, width});
  auto run = [&](bool halves, double& seconds, double& first, Tensors& grads) {
    plumb::InputBoundary boundary({input}, {true});
    const auto x = stack->forward(boundary.inputs()[0]);
    for (const auto& p : parameters) p.mutable_grad() = at::Tensor();
    const double begin = thread_seconds();
    if (halves) {
      auto half = plumb::stage_backward_input({x}, {gradient}, boundary);
      first = thread_seconds() - begin;
      plumb::stage_backward_weight(half.deferred);
      grads = half.input_grads;
    } else {
      grads = plumb::stage_backward({x}, {gradient}, boundary);
    }
    seconds = thread_seconds() - begin;
    for (const auto& p : parameters) grads.push_back(p.grad());
  };
  std::vector<double> whole, halves, ratios, shares;
  bool equal = true;
  for (int64_t r = 0; r < rounds + 3; ++r) {
    double a = 0, b = 0, first = 0;
    Tensors ga, gb;
    const bool swap = r % 2 == 1;
    if (swap) run(true, b, first, gb);
    run(false, a, first, ga);
    if (!swap) run(true, b, first, gb);
    for (size_t i = 0; i < ga.size(); ++i) equal = equal && ga[i].defined() && at::equal(ga[i], gb[i]);
    if (r < 3) continue;
    whole.push_back(a);
    halves.push_back(b);
    ratios.push_back(b / a);
    shares.push_back(first / b);
  }
  out[0] = sorted(whole)[0];
  out[1] = sorted(halves)[0];
  out[2] = sorted(ratios)[ratios.size() / 2];
  out[3] = sorted(shares)[shares.size() / 2];
  out[4] = equal;
  return 0;
} catch (const std::exception& e) {
  complain(e);
  return 1;
}

// One 8 x 8 linear a rank, in the environment's group; mean square loss on the last. out: seconds an action of rank 0's
// table, best and median of `steps`; the same of plain C++ eager with one linear.
int action_cost(const char* schedule, int64_t microbatches, int64_t steps, double* out) try {
  plumb::keep_freed_memory();
  auto group = plumb::make_group_from_environment();
  const int ranks = group.size();
  at::manual_seed(group.rank());
  auto weight = at::randn({8, 8}).requires_grad_(true), bias = at::zeros({8}).requires_grad_(true);
  auto forward = [=](const Tensors& in) -> Tensors { return {at::linear(in[0], weight, bias)}; };
  auto stage = std::make_shared<plumb::LambdaStage>(
      forward, std::vector<plumb::NamedTensor>{{"weight" + std::to_string(group.rank()), weight},
                                               {"bias" + std::to_string(group.rank()), bias}});
  plumb::PipelineOptions options;
  options.loss = [](const Tensors& o, const Tensors& t) { return at::mse_loss(o[0], t[0]); };
  options.return_outputs = false;
  auto table = plumb::make_schedule(schedule, ranks, int(microbatches));
  const double actions = double(table.rows[group.rank()].size());
  plumb::Pipeline pipeline(plumb::PipeTable::chain(ranks), table, {{group.rank(), stage}}, group, options);
  std::vector<Tensors> inputs(microbatches, {at::randn({4, 8})}), targets(microbatches, {at::randn({4, 8})});
  std::vector<double> times, eager;
  for (int64_t s = 0; s < steps + 5; ++s) {
    weight.mutable_grad() = bias.mutable_grad() = at::Tensor();
    double begin = wall_seconds();
    pipeline.step_microbatches(inputs, targets);
    if (s >= 5) times.push_back((wall_seconds() - begin) / actions);
    if (ranks > 1) continue;
    weight.mutable_grad() = bias.mutable_grad() = at::Tensor();
    begin = wall_seconds();
    for (int64_t m = 0; m < microbatches; ++m)
      at::mse_loss(at::linear(inputs[m][0], weight, bias), targets[m][0]).backward();
    if (s >= 5) eager.push_back((wall_seconds() - begin) / actions);
  }
  out[0] = sorted(times)[0];
  out[1] = sorted(times)[times.size() / 2];
  out[2] = eager.empty() ? 0 : sorted(eager)[0];
  out[3] = eager.empty() ? 0 : sorted(eager)[eager.size() / 2];
  return 0;
} catch (const std::exception& e) {
  complain(e);
  return 1;
}

// Trains a GPT in the environment's group: one step with allocations counted, then `steps` that are timed and recorded.
// The time line of the quickest is held against the simulation with the stages' own mean durations and messages of that
// step. out (rank 0): best and median seconds a step, the last loss, measured bubble, simulated bubble, the simulated
// step as a multiple of the measured one; every rank: peak bytes of all tensors, and those of weights, gradients and
// the optimizer's state before the step.
int train_gpt(const char* schedule, int64_t width, int64_t heads, int64_t sequence, int64_t vocabulary, int64_t layers,
              int64_t microbatches, int64_t rows, int64_t recompute, int64_t steps, double* out) try {
  count_allocations();
  plumb::keep_freed_memory();  // as `plumb train` does
  auto group = plumb::make_group_from_environment();
  const Shape shape{width, heads, sequence, vocabulary, layers};
  auto table = plumb::make_schedule(schedule, group.size(), int(microbatches));
  const int num_stages = table.num_stages();
  std::map<int, std::shared_ptr<plumb::StageFunction>> stages;
  Tensors parameters;
  for (int s : table.placement.stages_of(group.rank())) {
    stages[s] = gpt_stage(shape, layers * s / num_stages, layers * (s + 1) / num_stages);
    stages[s]->recompute = recompute != 0 ? plumb::Recompute::Cheap : plumb::Recompute::None;
    for (const auto& p : stages[s]->parameters()) parameters.push_back(p.tensor);
  }
  plumb::PipelineOptions options;
  options.loss = cross_entropy;
  options.return_outputs = false;
  options.record_timeline = true;
  plumb::Pipeline pipeline(plumb::PipeTable::chain(num_stages), table, stages, group, options);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  at::manual_seed(7);
  const Tensors inputs{at::randint(vocabulary, {rows * microbatches, sequence})};
  const Tensors targets{at::randint(vocabulary, {rows * microbatches, sequence})};
  std::vector<double> times;
  std::vector<plumb::TimelineEvent> line;
  double loss = 0;
  for (int64_t s = 0; s < steps + 2; ++s) {
    if (s == 1) out[7] = double(live_allocations());
    const double begin = wall_seconds();
    for (const auto& p : parameters) p.mutable_grad() = at::Tensor();
    auto result = pipeline.step(inputs, targets);
    optimizer.step();
    const double seconds = wall_seconds() - begin;
    if (result.loss.defined()) loss = result.loss.item<double>();
    if (s == 1) out[6] = double(peak_of_allocations());
    if (s < 2) continue;
    const auto of_step = pipeline.gather_timeline();
    if (times.empty() || seconds < *std::min_element(times.begin(), times.end())) line = of_step;
    times.push_back(seconds);
  }
  out[0] = sorted(times)[0];
  out[1] = sorted(times)[times.size() / 2];
  out[2] = loss;
  out[3] = plumb::measured_bubble(line);
  const auto simulation = plumb::simulate_schedule(table, plumb::measured_costs(line, num_stages));
  out[4] = simulation.bubble_rate();
  double first = line[0].start, last = line[0].end;
  for (const auto& e : line) {
    first = std::min(first, e.start);
    last = std::max(last, e.end);
  }
  out[5] = simulation.makespan / (last - first);
  return 0;
} catch (const std::exception& e) {
  complain(e);
  return 1;
}

}  // extern "C"
