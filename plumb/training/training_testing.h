// Small models and runs for this room's tests.
#pragma once

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "plumb/capture/capture.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/training/trainer.h"
#include "tests/message_of.h"

namespace plumb::testing_training {

namespace fs = std::filesystem;

struct LmImpl : torch::nn::Module {
  explicit LmImpl(double dropout = 0) : wte(32, 8), drop(dropout), head(8, 32) {
    register_module("wte", wte);
    register_module("norm", norm);
    register_module("drop", drop);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(drop(torch::gelu(norm(wte(ids))))); }
  torch::nn::Embedding wte;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  torch::nn::Dropout drop;
  torch::nn::Linear head;
};
TORCH_MODULE(Lm);

struct MlpImpl : torch::nn::Module {
  MlpImpl() : a(4, 8), norm(8), b(8, 2) {
    register_module("a", a);
    register_module("norm", norm);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::relu(norm(a(x)))); }
  torch::nn::Linear a;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear b;
};
TORCH_MODULE(Mlp);

// Events and results of a training.
struct Told {
  std::vector<nlohmann::json> events;
  TrainResult result;
  std::shared_ptr<GraphModule> module;

  std::vector<double> of(const char* name) const {
    std::vector<double> values;
    for (const auto& e : events) {
      if (e.contains(name)) values.push_back(e[name].is_number() ? e[name].get<double>() : NAN);
    }
    return values;
  }
  std::vector<double> losses() const { return of("loss"); }
};

class Training : public testing::Test {
 public:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "plumb_training_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
    std::string text;
    for (int i = 0; i < 400; ++i) text += static_cast<char>((i * i + i / 7) % 32);
    std::ofstream(folder / "tokens.bin", std::ios::binary) << text;
    std::ofstream(folder / "held.bin", std::ios::binary) << text.substr(100, 90);
    torch::manual_seed(1);
    save_tensors(at::randn({20, 4}), path("x.pt"));
    save_tensors(at::randn({20, 2}), path("y.pt"));
    save_tensors(at::rand({20, 2}) > 0.5, path("mask.pt"));
    options.data = path("tokens.bin");
    options.steps = 6;
    options.lr = 0.01;
    options.seed = 3;
    options.threads = 1;
  }
  void TearDown() override { fs::remove_all(folder); }
  std::string path(const std::string& name) const { return (folder / name).string(); }

  static std::shared_ptr<GraphModule> lm(double dropout = 0) {
    torch::manual_seed(5);
    Lm net(dropout);
    return capture(net, at::zeros({2, 7}, at::kLong));
  }
  static std::shared_ptr<GraphModule> mlp() {
    torch::manual_seed(5);
    Mlp net;
    return capture(net, at::randn({4, 4}));
  }
  // Trains the module, or options.file.
  static Told run(const TrainOptions& options, std::shared_ptr<GraphModule> module = nullptr) {
    Told told;
    told.module = module;
    Trainer trainer(options, {.event = [&](const TrainEvent& e) { told.events.push_back(to_json(e)); }},
                    {module, nullptr});
    told.result = trainer.run();
    return told;
  }
  TrainOptions with(const std::string& name, const std::vector<std::string>& texts) const {
    TrainOptions changed = options;
    set_field(changed, train_field(name), texts);
    return changed;
  }
  TrainOptions rows() const {
    TrainOptions o = options;
    o.data = path("x.pt");
    o.targets = path("y.pt");
    o.loss = "mse";
    return o;
  }

  fs::path folder;
  TrainOptions options;
};

}  // namespace plumb::testing_training
