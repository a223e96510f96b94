// Trains a small model over two processes with the schedule written by hand in schedule.csv, and checks it against one
// process. Starts both processes itself; runs under torchrun, mpirun and srun, too.
//
//   plumb_two_ranks schedule.csv
#include <torch/torch.h>

#include <iostream>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/partition/split.h"
#include "plumb/pipeline/launch/launch.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/runtime.h"

namespace {

constexpr int kMicrobatches = 4, kRows = 64, kSteps = 100;

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  torch::nn::Sequential net;  // one after the other: compilers differ in which argument of a call they make first
  net->push_back(torch::nn::Linear(8, 32));
  net->push_back(torch::nn::GELU());
  net->push_back(torch::nn::Linear(32, 32));
  net->push_back(torch::nn::GELU());
  net->push_back(torch::nn::Linear(32, 1));
  return net;
}

// Inputs and targets of a step, the same in every process.
std::pair<at::Tensor, at::Tensor> batch(int step) {
  torch::manual_seed(static_cast<uint64_t>(step));
  const at::Tensor x = torch::randn({kRows, 8});
  return {x, (x.narrow(1, 0, 1) * x.narrow(1, 1, 1)).sin()};
}

// A rank's part; returns the losses on the rank that has the last stage.
std::vector<double> train(const plumb::ProcessGroup& group, const std::string& table) {
  auto model = make_model();
  auto graph = plumb::capture(model, torch::zeros({kRows / kMicrobatches, 8}));
  plumb::SplitOptions cut;
  cut.points.emplace_back("2", plumb::SplitPoint::Beginning);  // before the second Linear
  auto pipe = plumb::pipeline(*graph, cut);
  auto schedule = plumb::read_csv(table);
  auto stages = plumb::stages_of_rank(*pipe, schedule, group.rank());

  std::vector<at::Tensor> parameters;
  for (const auto& [index, stage] : stages) {
    for (const auto& p : stage->parameters()) parameters.push_back(p.tensor);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
  plumb::PipelineOptions options;
  options.loss = [](const plumb::Tensors& y, const plumb::Tensors& target) { return at::mse_loss(y[0], target[0]); };
  plumb::Pipeline pipeline(pipe->table(), schedule, stages, group, options);

  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [x, target] = batch(step);
    const auto result = pipeline.step({x}, {target});
    optimizer.step();
    if (!result.losses.empty()) losses.push_back(at::stack(result.losses).mean().item<double>());
  }
  return losses;
}

// Trains without plumb: microbatches one after the other.
std::vector<double> train_alone() {
  auto model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [x, target] = batch(step);
    const auto xs = x.chunk(kMicrobatches), targets = target.chunk(kMicrobatches);
    std::vector<at::Tensor> parts;
    for (size_t m = 0; m < kMicrobatches; ++m) {
      parts.push_back(at::mse_loss(model->forward(xs[m]), targets[m]));
      parts.back().backward();
    }
    for (at::Tensor& p : model->parameters()) p.mutable_grad().div_(kMicrobatches);
    optimizer.step();
    losses.push_back(at::stack(parts).mean().item<double>());
  }
  return losses;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: plumb_two_ranks schedule.csv\n";
    return 2;
  }
  at::set_num_threads(1);
  if (!plumb::discover_ranks()) {
    plumb::LaunchOptions launch;
    launch.num_processes = 2;
    launch.arguments = {argv[1]};
    return plumb::launch_local(launch).exit_code();
  }
  const auto losses = train(plumb::make_group_from_environment(), argv[1]);
  if (losses.empty()) return 0;  // the other rank has them
  const bool same = losses == train_alone();
  std::cout << "loss " << losses.front() << " -> " << losses.back() << "; one process gives "
            << (same ? "the very same losses" : "OTHER losses") << "\n";
  return same && losses.back() < losses.front() ? 0 : 1;
} catch (const plumb::Error& e) {
  std::cerr << "plumb_two_ranks: " << e.what() << "\n";
  return 1;
}
