#include "plumb/partition/wrappers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/capture/capture.h"
#include "plumb/partition/split.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

PipeSequential three_parts() {
  torch::manual_seed(0);
  return PipeSequential(torch::nn::Linear(4, 8), torch::nn::GELU(), torch::nn::Linear(8, 2));
}

TEST(Wrappers, APipeSequentialIsOneStageAModule) {
  auto net = three_parts();
  const at::Tensor x = torch::randn({3, 4});
  auto pipe = pipeline(*capture(net, x));
  EXPECT_EQ(pipe->num_stages(), 3);
  EXPECT_TRUE(pipe->stage(2)->state().contains("2.weight"));
  EXPECT_TRUE(at::equal(pipe->run({x})[0].toTensor(), net->forward(x)));
}

TEST(Wrappers, ANumberThatAModelWasCapturedWithIsHeldAgainstThatOfEveryRun) {
  auto net = three_parts();
  const auto times = [&](const at::Tensor& x, int64_t factor) { return net->forward(x * factor); };
  const at::Tensor x = torch::randn({3, 4});
  auto pipe = pipeline(*capture_call(*net, times, {}, x, int64_t{3}));
  EXPECT_TRUE(at::equal(pipe->run({x, 3})[0].toTensor(), times(x, 3)));
  EXPECT_THAT(message_of([&] { pipe->run({x, 4}); }), testing::HasSubstr("input 'x1' is fixed to 3"));
}

TEST(Wrappers, ALossWrapperNeedsALoss) { EXPECT_THROW(trivial_loss_wrapper(three_parts(), nullptr), Error); }

TEST(Wrappers, ALossWrapperMakesAPipeThatGoesBack) {
  auto net = three_parts();
  auto wrapped = trivial_loss_wrapper(
      net, [](const at::Tensor& output, const at::Tensor& targets) { return at::mse_loss(output, targets); });
  const at::Tensor x = torch::randn({3, 4}), y = torch::randn({3, 2});
  SplitOptions options;
  options.loss_spec = c10::IValue(true);
  auto pipe = pipeline(*capture(wrapped, x, y), options);
  ASSERT_TRUE(pipe->has_loss_and_backward());
  EXPECT_EQ(pipe->num_stages(), 3);
  const auto result = pipe->run_with_backward({x, y});
  const at::Tensor grad = wrapped->named_parameters()["module.0.weight"].grad().clone();
  wrapped->zero_grad();
  const at::Tensor loss = wrapped->forward(x, y);
  loss.backward();
  EXPECT_TRUE(at::equal(result.outputs[0].toTensor(), loss));
  EXPECT_TRUE(at::equal(grad, wrapped->named_parameters()["module.0.weight"].grad()));
}

}  // namespace
}  // namespace plumb
