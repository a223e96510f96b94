#include "plumb/autograd/simulate_format.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

TEST(SimulateFormatOperator, RoundsForwardAndBackward) {
  at::Tensor x = at::randn({100}), g = at::randn({100}), kept = g.clone();
  const auto fwd = FPFormat::parse("E4M3"), bwd = FPFormat::parse("E5M2");
  auto run = [&](const char* f, const char* b) {
    at::Tensor leaf = x.clone().requires_grad_();
    at::Tensor y = ops::simulate_format(leaf, f, b);
    y.backward(g);
    return std::pair(y.detach(), leaf.grad());
  };
  EXPECT_TRUE(at::equal(run("E4M3", "E5M2").first, quantise(x, fwd)));
  EXPECT_TRUE(at::equal(run("E4M3", "E5M2").second, quantise(g, bwd)));
  EXPECT_TRUE(at::equal(run("none", "E5M2").first, x));
  EXPECT_TRUE(at::equal(run("none", "E5M2").second, quantise(g, bwd)));
  EXPECT_TRUE(at::equal(run("E4M3", "none").second, g));
  EXPECT_TRUE(at::equal(g, kept)) << "the caller's gradient was changed";
}

TEST(SimulateFormatOperator, RoundsOnlyGradientsThatNobodyElseSees) {
  at::Tensor x = at::randn({1000}).requires_grad_();
  at::Tensor middle = x * 2;
  at::Tensor y = ops::simulate_format(middle, "none", "E2M1");
  at::Tensor seen;
  y.register_hook([&](const at::Tensor& g) { seen = g; });
  at::Tensor loss = (y * y).sum();
  loss.backward();
  EXPECT_TRUE(at::equal(seen, 2 * y.detach()));
  EXPECT_TRUE(at::equal(x.grad(), 2 * quantise(seen, FPFormat::parse("E2M1"))));
}

TEST(SimulateFormatOperator, BackwardIsReproducibleUnderASeed) {
  at::Tensor x = at::randn({1000}).requires_grad_(), g = at::randn({1000});
  auto gradient = [&](int64_t seed) {
    return torch::autograd::grad({ops::simulate_format(x, "E4M3-SR", "E5M2-SR", seed)}, {x}, {g})[0];
  };
  EXPECT_TRUE(at::equal(gradient(1), gradient(1)));
  EXPECT_FALSE(at::equal(gradient(1), gradient(2)));
}

TEST(SimulateFormatOperator, AnIdentityForwardSharesMemoryAndTellsOfWrites) {
  at::Tensor x = at::randn({10}).requires_grad_();
  at::Tensor a = at::sigmoid(x);  // keeps its output for the backward pass
  at::Tensor y = ops::simulate_format(a, "none", "E5M2");
  EXPECT_EQ(y.const_data_ptr(), a.const_data_ptr());
  y.mul_(2);
  EXPECT_ANY_THROW(y.sum().backward());
  at::Tensor b = x * 2;
  at::Tensor z = ops::simulate_format(b, "none", "E5M2");
  z.relu_();
  z.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * (x.detach() > 0).to(at::kFloat)));
}

TEST(SimulateFormatOperator, DoubleBackwardWorks) {
  at::Tensor x = at::randn({10}).requires_grad_();
  at::Tensor y = ops::simulate_format(x * x, "none", "fp32");
  at::Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
  at::Tensor h = torch::autograd::grad({g.sum()}, {x})[0];
  EXPECT_TRUE(at::equal(h, at::full({10}, 2.0)));
}

TEST(SimulateFormatOperator, MetaTensorsHaveTheShapesOfRealOnes) {
  at::Tensor x = at::randn({4, 6}).t(), meta = x.to(at::kMeta);
  EXPECT_EQ(ops::simulate_format(meta, "E4M3", "E5M2").sizes(), x.sizes());
}

TEST(SimulateFormatOperator, TakesFormatsWithSharedScalesAlongADimension) {
  at::manual_seed(8);
  at::Tensor x = at::randn({8, 48}).requires_grad_();
  for (const char* text : {"mxfp8", "mxfp8e5m2", "mxfp6", "mxfp6e3m2", "mxfp4", "mxfp4e2m1", "nvfp4"}) {
    const FPFormat format = FPFormat::parse(text);
    const at::Tensor g = at::randn_like(x);
    at::Tensor y = ops::simulate_format(x, text, text, std::nullopt, 0);
    EXPECT_TRUE(at::equal(y, quantise(x, format, std::nullopt, 0)));
    y.backward(g);
    EXPECT_TRUE(at::equal(x.grad(), quantise(g, format, std::nullopt, 0)));
    x.mutable_grad() = at::Tensor();
  }
}

}  // namespace
}  // namespace plumb
