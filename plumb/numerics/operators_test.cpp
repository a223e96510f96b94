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

TEST(Operators, MetaTensorsHaveTheShapesOfRealOnes) {
  at::Tensor x = at::randn({4, 6}).t(), meta = x.to(at::kMeta);
  EXPECT_EQ(ops::quantise(meta, "E4M3").strides(), ops::quantise(x, "E4M3").strides());
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
