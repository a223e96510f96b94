#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    up = register_module("up", torch::nn::Linear(torch::nn::LinearOptions(4, 8).bias(false)));
    down = register_module("down", torch::nn::Linear(8, 4));
  }
  at::Tensor forward(at::Tensor x) {
    x = x + norm(x);
    return x + down(torch::relu(up(x)));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// Returns the paths of the calls of this operator, in order.
std::vector<std::string> paths_of(const GraphModule& module, std::string_view op) {
  std::vector<std::string> paths;
  for (const Node* node : module.graph().nodes()) {
    if (node->is_op(op)) paths.push_back(node->meta().module_path());
  }
  return paths;
}

TEST(ModuleNames, OfACppModuleFollowFromTheParametersThatNodesRead) {
  auto net = torch::nn::Sequential(Block(), Block(), torch::nn::Linear(4, 2));
  const auto graph = capture(net, torch::randn({3, 4}));
  EXPECT_EQ(paths_of(*graph, "aten::layer_norm"), (std::vector<std::string>{"0.norm", "1.norm"}));
  EXPECT_EQ(paths_of(*graph, "aten::relu"), (std::vector<std::string>{"0", "1"})) << "between up and down";
  EXPECT_EQ(paths_of(*graph, "aten::add"), (std::vector<std::string>{"0", "0", "1", "1"})) << "residual, both";
  const auto products = paths_of(*graph, "aten::matmul");
  EXPECT_TRUE(products.empty() || products.front() == "0.up") << "by the transposed weight";
  for (const Node* node : graph->graph().nodes()) {
    EXPECT_TRUE(!node->is_call() || node->meta().modules) << node->describe();
  }
  const ModuleStack& stack = *graph->graph().attributes().back()->result()->uses().front().user->meta().modules;
  ASSERT_EQ(stack.size(), 2u);
  EXPECT_EQ(stack.front().path, "");
  EXPECT_NE(stack.back().type.find("Linear"), std::string::npos) << stack.back().type;
}

TEST(Modes, OfACppModulesGraphAreRefusedWhereTheyWouldMatter) {
  auto drop = torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Dropout(0.5));
  const auto trained = capture(drop, torch::randn({3, 4}));
  EXPECT_TRUE(trained->is_training());
  trained->train();
  try {
    trained->eval();
    ADD_FAILURE() << "it would still drop";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::InvalidState);
    EXPECT_NE(e.message().find("made in training mode"), std::string::npos) << e.message();
    EXPECT_NE(e.remedy().find("model->eval()"), std::string::npos) << e.remedy();
  }
  drop->eval();
  const auto evaluated = capture(drop, torch::randn({3, 4}));
  EXPECT_FALSE(evaluated->is_training());
  EXPECT_FALSE(evaluated->deep_copy()->is_training());

  auto plain = torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::ReLU());
  const auto any = capture(plain, torch::randn({3, 4}));
  any->eval();
  EXPECT_FALSE(any->is_training()) << "nothing in it knows a mode";
}

}  // namespace
}  // namespace plumb
