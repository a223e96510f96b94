#include "plumb/capture/captured_model.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/message_of.h"

namespace plumb {
namespace {

torch::nn::Sequential drop_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::GELU(), torch::nn::BatchNorm1d(8),
                               torch::nn::Linear(8, 2));
}

TEST(CapturedModel, TakesALastPartialBatchAndTrainsTheModelsOwnParameters) {
  torch::manual_seed(0);
  auto net = drop_net();
  CapturedModel captured(net);
  for (const int64_t rows : {6, 6, 2, 6, 2}) {
    const at::Tensor x = torch::randn({rows, 4});
    auto twin = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    const at::Tensor want = twin->forward(x);
    want.square().sum().backward();
    net->zero_grad();
    const at::Tensor got = captured(x);
    got.square().sum().backward();
    EXPECT_TRUE(at::equal(got, want));
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(at::equal(net->parameters()[i].grad(), twin->parameters()[i].grad()));
    EXPECT_TRUE(at::equal(net->buffers()[0], twin->buffers()[0]));
  }
  EXPECT_EQ(captured.num_graphs(), 2u);
  net->eval();
  EXPECT_TRUE(at::equal(captured(torch::ones({2, 4})), net->forward(torch::ones({2, 4}))));
  EXPECT_EQ(captured.num_graphs(), 3u) << "another mode, another graph";
}

TEST(CapturedModel, FollowsOptionsOfLayersAndAutocast) {
  torch::manual_seed(0);
  torch::nn::Dropout drop(0.0);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
  torch::nn::Sequential net(torch::nn::Linear(4, 4), norm, drop);
  CapturedModel captured(net);
  const at::Tensor x = torch::randn({3, 4});
  const auto expect_same = [&](size_t graphs) {
    EXPECT_TRUE(at::equal(captured(x), net->forward(x)));
    EXPECT_EQ(captured.num_graphs(), graphs);
  };
  expect_same(1);
  norm->options.eps(1.0);
  expect_same(2);
  drop->options.p(1.0);
  expect_same(3);
  drop->options.p(0.0);
  expect_same(3);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  expect_same(4);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  expect_same(4);
}

TEST(CapturedModel, TakesAnUndefinedInputAndRefusesATransformThatReturnsNull) {
  struct Masked : torch::nn::Module {
    at::Tensor forward(at::Tensor x, at::Tensor mask) { return mask.defined() ? x * mask : x * 2; }
  };
  CapturedModel captured(std::make_shared<Masked>());
  const at::Tensor x = torch::randn({4});
  EXPECT_TRUE(at::equal(captured(x, at::Tensor()), x * 2));
  EXPECT_TRUE(at::equal(captured(x, x), x * x));
  EXPECT_EQ(captured.num_graphs(), 2u);
  CapturedModel none(std::make_shared<Masked>(), [](const auto&) { return std::shared_ptr<GraphModule>(); });
  EXPECT_THROW(none(x, x), Error);
}

TEST(CapturedModel, GraphsOfATransformShareTheFirstsParameters) {
  torch::manual_seed(0);
  auto net = drop_net();
  // A transform that has parameters of its own: copies, as unit_scale makes them.
  CapturedModel captured(net, [](const std::shared_ptr<GraphModule>& graph) { return graph->deep_copy(); });
  EXPECT_THROW(captured.parameters(), Error);
  captured(torch::randn({6, 4}));
  {
    at::NoGradGuard no_grad;
    for (auto& p : captured.parameters()) p.mul_(2);
  }
  const auto partial = captured.graph(torch::randn({2, 4}));
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(partial->parameters()[i].is_same(captured.parameters()[i]));
    EXPECT_TRUE(at::equal(partial->parameters()[i], net->parameters()[i] * 2));
  }
}

TEST(CapturedModel, RefusesByNameATensorThatTheModelHasExchanged) {
  struct Net : torch::nn::Module {
    Net() : layer(register_module("layer", torch::nn::Linear(4, 4))) {}
    at::Tensor forward(at::Tensor x) { return layer(x); }
    torch::nn::Linear layer;
  };
  auto net = std::make_shared<Net>();
  CapturedModel captured(net);
  const at::Tensor x = torch::ones({2, 4});
  captured(x);
  {
    const at::NoGradGuard no_grad;
    net->layer->weight.mul_(2);
  }
  EXPECT_TRUE(at::equal(captured(x), net->forward(x)));
  net->layer = net->replace_module("layer", torch::nn::Linear(4, 4));
  EXPECT_THAT(message_of([&] { captured(x); }), testing::HasSubstr("'layer.weight' is another tensor"));
}

}  // namespace
}  // namespace plumb
