#include "plumb/numerics/operators.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

TEST(Operators, QuantiseGoesThroughTheDispatcher) {
  at::Tensor x = at::randn({100});
  EXPECT_TRUE(at::equal(ops::quantise(x, "E4M3"), quantise(x, FPFormat::parse("E4M3"))));
  EXPECT_TRUE(at::equal(ops::quantise(x, "E4M3", "toward_zero"), quantise(x, FPFormat::parse("E4M3-RZ"))));
  EXPECT_TRUE(at::equal(ops::quantise(x, "E4M3", "stochastic", 5, 3), quantise(x, FPFormat::parse("E4M3-SR5"), 3)));
  EXPECT_TRUE(at::equal(ops::quantise(x, "E4M3-SR5", "", 0, 3), quantise(x, FPFormat::parse("E4M3-SR5"), 3)));
  EXPECT_TRUE(at::equal(ops::quantise(x, "E4M3-SR5", "nearest"), quantise(x, FPFormat::parse("E4M3"))));
  EXPECT_THROW(ops::quantise(x, "nonsense"), Error);
  EXPECT_THROW(ops::quantise(x, "E4M3", "sideways"), Error);
  EXPECT_THROW(ops::quantise(x, "E4M3", "nearest", 3), Error);
}

TEST(Operators, QuantisePassesTheGradientUnchanged) {
  at::Tensor x = at::randn({100}).requires_grad_(), g = at::randn({100});
  at::Tensor y = ops::quantise(x, "E2M1");
  EXPECT_TRUE(y.requires_grad());
  y.backward(g);
  EXPECT_TRUE(at::equal(x.grad(), g));
  at::NoGradGuard no_grad;
  EXPECT_FALSE(ops::quantise(x, "E2M1").requires_grad());
}

TEST(Operators, SimulateFormatRoundsForwardAndBackward) {
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

TEST(Operators, SimulateFormatRoundsOnlyGradientsThatNobodyElseSees) {
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

TEST(Operators, BackwardIsReproducibleUnderASeed) {
  at::Tensor x = at::randn({1000}).requires_grad_(), g = at::randn({1000});
  auto gradient = [&](int64_t seed) {
    return torch::autograd::grad({ops::simulate_format(x, "E4M3-SR", "E5M2-SR", seed)}, {x}, {g})[0];
  };
  EXPECT_TRUE(at::equal(gradient(1), gradient(1)));
  EXPECT_FALSE(at::equal(gradient(1), gradient(2)));
}

TEST(Operators, AnIdentityForwardSharesMemoryAndTellsOfWrites) {
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

TEST(Operators, DoubleBackwardWorks) {
  at::Tensor x = at::randn({10}).requires_grad_();
  at::Tensor y = ops::simulate_format(x * x, "none", "fp32");
  at::Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
  at::Tensor h = torch::autograd::grad({g.sum()}, {x})[0];
  EXPECT_TRUE(at::equal(h, at::full({10}, 2.0)));
}

TEST(Operators, MetaTensorsHaveTheShapesOfRealOnes) {
  at::Tensor x = at::randn({4, 6}).t(), meta = x.to(at::kMeta);
  EXPECT_EQ(ops::quantise(meta, "E4M3").strides(), ops::quantise(x, "E4M3").strides());
  EXPECT_EQ(ops::simulate_format(meta, "E4M3", "E5M2").sizes(), x.sizes());
  EXPECT_EQ(ops::encode(meta, "E4M3").scalar_type(), at::kByte);
  EXPECT_EQ(ops::decode(at::empty({3}, at::device(at::kMeta).dtype(at::kByte)), "E4M3", at::kHalf).scalar_type(),
            at::kHalf);
  EXPECT_EQ(ops::tensor_metrics(meta, true).numel(), 265);
  EXPECT_THROW(ops::quantise(meta, "nonsense"), Error);
  EXPECT_THROW(ops::quantise(at::empty({2}, at::device(at::kMeta).dtype(at::kLong)), "E4M3"), Error);
}

TEST(Operators, CodesRoundTripAndMetricsComeBack) {
  at::Tensor x = at::randn({50});
  EXPECT_TRUE(at::equal(ops::decode(ops::encode(x, "E4M3"), "E4M3"), quantise(x, FPFormat::parse("E4M3"))));
  for (bool histogram : {false, true}) {
    TensorMetrics expected = measure(x, {histogram}), got = metrics_of_tensor(ops::tensor_metrics(x, histogram));
    EXPECT_EQ(got.std, expected.std);
    EXPECT_EQ(got.numel, 50);
    EXPECT_EQ(got.histogram.has_value(), histogram);
    if (histogram) EXPECT_EQ(got.histogram->counts, expected.histogram->counts);
  }
  EXPECT_THROW(metrics_of_tensor(x), Error);
}

TEST(Operators, MetricsLeaveHistoryAlone) {
  at::Tensor x = at::randn({50}).requires_grad_();
  EXPECT_FALSE(ops::tensor_metrics(x).requires_grad());
  EXPECT_FALSE(ops::encode(x, "E4M3").requires_grad());
}

TEST(Operators, FormatsAreReadOnce) { EXPECT_EQ(&cached_format("E4M3-SR"), &cached_format("E4M3-SR")); }

}  // namespace
}  // namespace plumb
