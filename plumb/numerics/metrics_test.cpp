#include "plumb/numerics/metrics.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/reference_testing.h"

namespace plumb {
namespace {

using reference::kInf;
using reference::kNaN;

std::vector<int64_t> slow_histogram(const at::Tensor& x) {
  std::vector<int64_t> counts(256);
  at::Tensor wide = x.to(at::kDouble).contiguous();
  const double* v = wide.const_data_ptr<double>();
  for (int64_t i = 0; i < wide.numel(); ++i) {
    int bin = !std::isfinite(v[i]) ? 255 : v[i] == 0 ? 0 : std::clamp(std::ilogb(v[i]) + 127, 0, 254);
    ++counts[size_t(bin)];
  }
  return counts;
}

void expect_close(double got, double expected, const char* name) {
  if (std::isnan(expected))
    EXPECT_TRUE(std::isnan(got)) << name << " " << got;
  else if (std::isinf(expected))
    EXPECT_EQ(got, expected) << name;
  else
    EXPECT_LE(std::fabs(got - expected), 1e-6 * std::fabs(expected)) << name << " " << got << " " << expected;
}

void expect_torch(const TensorMetrics& m, const at::Tensor& x) {
  at::Tensor wide = x.to(at::kDouble);
  expect_close(m.mean_abs, wide.abs().mean().item<double>(), "mean_abs");
  // A mean near zero is a difference of large sums: its error is relative to what was summed. A lane adds 64 floats,
  // each to half a last bit.
  double mean = wide.mean().abs().item<double>();
  if (std::isfinite(mean))
    EXPECT_NEAR(m.abs_mean, mean, 64 * 0x1p-24 * wide.abs().mean().item<double>());
  else
    expect_close(m.abs_mean, mean, "abs_mean");
  if (x.numel() > 1)
    expect_close(m.std, wide.std().item<double>(), "std");
  else
    EXPECT_TRUE(std::isnan(m.std));
  expect_close(m.abs_max, wide.abs().max().item<double>(), "abs_max");
  expect_close(m.abs_min, wide.abs().min().item<double>(), "abs_min");
  EXPECT_EQ(m.numel, x.numel());
  EXPECT_EQ(m.nan_count, at::isnan(wide).sum().item<int64_t>());
  EXPECT_EQ(m.inf_count, at::isinf(wide).sum().item<int64_t>());
  EXPECT_EQ(m.zero_count, (wide == 0).sum().item<int64_t>());
  auto slow = slow_histogram(x);
  ASSERT_TRUE(m.histogram);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(m.histogram->counts[size_t(i)], slow[size_t(i)]) << "bin " << i;
}

// On every level of the kernels.
void expect_torch(const at::Tensor& x) {
  expect_torch(measure(x, {.histogram = true}), x);
  const kernel::KernelTable* tables[3];
  const int n = kernel::runnable_kernels(tables);
  at::Tensor dense = x.contiguous();
  for (int i = 0; i < n; ++i) {
    SCOPED_TRACE(tables[i]->level);
    kernel::Partial partial;
    std::array<uint64_t, 256> counts{};
    partial.histogram = counts.data();
    tables[i]->measure[carrier_of(x.scalar_type(), "test")](dense.const_data_ptr(), x.numel(), partial);
    expect_torch(finish_metrics(partial, x.numel()), x);
  }
}

TEST(Metrics, AgreeWithTorchForEverySizeUpToAFewBlocks) {
  at::manual_seed(1);
  for (int64_t n : {1, 2, 3, 7, 15, 16, 17, 31, 63, 64, 65, 100, 511, 512, 513, 1000, 1025, 4095, 4096, 4097, 10000})
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(n);
      expect_torch(at::randn({n}).to(dtype));
    }
}

TEST(Metrics, AgreeWithTorchOnManyElements) {
  at::manual_seed(2);
  at::Tensor x = at::randn({1200000});
  expect_torch(x);
  expect_torch(at::relu(x));
  expect_torch(x.to(at::kHalf));
}

TEST(Metrics, ALargeMeanCostsNoDigits) {
  at::manual_seed(3);
  for (double mean : {1e4, -1e4, 1e6}) expect_torch(at::randn({100000}) + mean);
}

TEST(Metrics, AnyRangeOfValues) {
  at::manual_seed(4);
  at::Tensor x = at::randn({20000});
  for (double scale : {1e-12, 1e-18, 1e-20, 1e-25, 1e-38, 1e-44, 1e15, 1e19, 1e25, 1e37}) {
    SCOPED_TRACE(scale);
    expect_torch(x * scale);
    at::Tensor mixed = x.clone();
    mixed.slice(0, 5000, 9000).mul_(scale);
    expect_torch(mixed);
  }
  expect_torch(x * at::exp2(at::randint(-120, 120, {20000}).to(at::kFloat)));
  expect_torch(x.to(at::kDouble) * 1e100);
  expect_torch(x.to(at::kDouble) * 1e-100);
  expect_torch(at::full({5000}, 3.25));
  expect_torch(at::full({5000}, 1e-30));
  expect_torch(at::zeros({5000}));
}

// Powers of two change no digits; torch's own std overflows here.
TEST(Metrics, DeviationsOfFloat64HaveItsWholeRange) {
  at::manual_seed(13);
  for (int64_t n : {2, 17, 5000, 300000}) {
    const at::Tensor x = at::randn({n}, at::kDouble) + 0.5;
    const TensorMetrics plain = measure(x);
    for (int exponent : {-1000, -700, -433, -432, -300, 300, 431, 432, 700, 1018}) {
      const at::Tensor large = x * std::ldexp(1.0, exponent / 2) * std::ldexp(1.0, exponent - exponent / 2);
      const std::string what = std::to_string(n) + " values of 2^" + std::to_string(exponent);
      TensorMetrics before, after;
      quantise_and_measure(large, FPFormat::parse("E4M3"), &before, &after);
      for (const TensorMetrics& m : {measure(large), before}) {
        for (auto [got, of] : {std::pair(m.std, plain.std), {m.mean_abs, plain.mean_abs}, {m.abs_mean, plain.abs_mean}})
          EXPECT_NEAR(std::ldexp(got, -exponent / 2) * std::ldexp(1.0, exponent / 2 - exponent), of, 1e-9 * of) << what;
        EXPECT_EQ(m.abs_max, large.abs().max().item<double>()) << what;
      }
    }
  }
}

TEST(Metrics, PartsOfAnyFloat64MagnitudeAreMeasuredAsOne) {
  at::manual_seed(14);
  const at::Tensor x = at::randn({300000}, at::kDouble);
  std::vector<at::Tensor> parts = {x * 1e-250, x, x.slice(0, 0, 1000) * 1e200, x * 3e200, x.slice(0, 0, 7) * 1e-300};
  MetricsSum sum;
  for (const at::Tensor& part : parts) sum.add(part);
  const at::Tensor all = at::cat(parts);
  const double expected = (all * 1e-200).std().item<double>() * 1e200;
  EXPECT_NEAR(sum.metrics().std, expected, 1e-9 * expected);
  EXPECT_NEAR(measure(all).std, expected, 1e-9 * expected);
}

TEST(Metrics, HistogramsOfAnySpreadCountEveryValue) {
  at::manual_seed(2);
  for (int64_t n : {512, 700, 4096, 5000}) {
    expect_torch(at::ones({n}));                          // one bin
    for (double spread : {3.0, 12.0, 16.0, 40.0, 200.0})  // bins below the largest
      for (double top : {120.0, 1.0, -110.0})             // down to what is no normal number
        expect_torch(at::exp2(top - spread * at::rand({n})) * at::randn({n}).sign());
  }
}

// Lanes of one magnitude are added in another order, which must not round: the bits are those of one after another.
TEST(Metrics, LanesOfAnyMagnitudesAddUpToTheSameBits) {
  const kernel::KernelTable* tables[3];
  const int levels = kernel::runnable_kernels(tables);
  constexpr int kLanes[] = {8, 16, 64};  // number of lanes at each level
  at::manual_seed(3);
  for (double spread : {0.0, 4.0, 20.0, 22.0, 25.0, 40.0, 60.0})
    for (int level = 0; level < levels; ++level) {
      const int lanes = kLanes[level];
      // All of a lane have its own magnitude.
      const at::Tensor scale = at::exp2(at::floor(-spread * at::rand({lanes})));
      const at::Tensor x = (at::randn({64, lanes}) * scale).contiguous();
      std::vector<float> sums(size_t(lanes), 0.0f);
      for (int64_t i = 0; i < x.numel(); ++i) sums[size_t(i % lanes)] += std::fabs(x.const_data_ptr<float>()[i]);
      double expected = 0;
      for (float sum : sums) expected += double(sum);
      kernel::Partial partial;
      tables[level]->measure[kernel::kFloat32](x.const_data_ptr(), x.numel(), partial);
      EXPECT_EQ(partial.sum_abs, expected) << tables[level]->level << " " << spread;
    }
}

TEST(Metrics, NaNAndInfinityGiveWhatTorchGivesAndAreCounted) {
  at::manual_seed(5);
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (double special : {kNaN, kInf, -kInf})
      for (int64_t place : {0, 5, 4095, 4999}) {
        at::Tensor x = at::randn({5000}).to(dtype);
        x[place] = special;
        x[17] = 0;
        expect_torch(x);
      }
    at::Tensor both = at::randn({300}).to(dtype);
    both[3] = kInf;
    both[9] = -kInf;
    expect_torch(both);
    both[200] = kNaN;
    expect_torch(both);
    expect_torch(at::full({70}, kInf).to(dtype));
    expect_torch(at::full({70}, kNaN).to(dtype));
  }
}

TEST(Metrics, EmptyAndScalarTensors) {
  TensorMetrics empty = measure(at::empty({0, 4}), {.histogram = true});
  EXPECT_EQ(empty.numel, 0);
  for (double v : {empty.mean_abs, empty.abs_mean, empty.std, empty.abs_max, empty.abs_min}) EXPECT_TRUE(std::isnan(v));
  EXPECT_EQ(empty.zero_share(), 0);
  EXPECT_EQ(empty.underflow_share(FPFormat::parse("E4M3")), 0);
  TensorMetrics scalar = measure(at::scalar_tensor(-3.0));
  EXPECT_EQ(scalar.mean_abs, 3);
  EXPECT_EQ(scalar.abs_mean, 3);
  EXPECT_EQ(scalar.abs_max, 3);
  EXPECT_EQ(scalar.abs_min, 3);
  EXPECT_TRUE(std::isnan(scalar.std));
  EXPECT_FALSE(scalar.histogram);
}

TEST(Metrics, AnyStrides) {
  at::manual_seed(6);
  at::Tensor x = at::randn({30, 40, 50});
  for (const auto& view :
       {x.permute({2, 0, 1}), x.slice(1, 0, 40, 3), x.select(2, 3), x.select(0, 0).t().slice(0, 1, 50, 7),
        x.select(0, 0).unsqueeze(0).expand({300, 40, 50}), x.flip(1), at::_neg_view(x)})
    expect_torch(view);
  at::Tensor large = at::randn({1000, 700}).slice(1, 0, 700, 2);
  expect_torch(large);
  // Far more elements than memory: measured piece by piece.
  EXPECT_EQ(measure(at::ones({1}).expand({1 << 22})).mean_abs, 1);
}

TEST(Metrics, OtherDtypes) {
  at::Tensor x = at::arange(-50, 50);
  for (auto dtype : {at::kInt, at::kLong, at::kShort, at::kChar})
    expect_torch(measure(x.to(dtype), {.histogram = true}), x);
  at::Tensor flags = x > 10;
  expect_torch(measure(flags, {.histogram = true}), flags.to(at::kDouble));
  at::Tensor fp8 = at::randn({1000}).to(at::kFloat8_e4m3fn);
  expect_torch(measure(fp8, {.histogram = true}), fp8.to(at::kFloat));
  EXPECT_THROW(measure(at::empty({3}, at::kComplexFloat)), Error);
  EXPECT_THROW(measure(at::Tensor()), Error);
  EXPECT_THROW(measure(at::empty({3}, at::kMeta)), Error);
}

TEST(Metrics, ValuesOfOneSignHaveOneMean) {
  at::manual_seed(11);
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (int64_t n : {1, 3, 16, 100, 4097, 70000, 1200000}) {
      const at::Tensor x = at::randn({n}, at::kDouble);
      for (const at::Tensor& each :
           {x.relu(), -x.relu(), x.abs() + 0.1, at::full({n}, 0.1, at::kDouble), x.abs() * 1e-4}) {
        const TensorMetrics m = measure(each.to(dtype));
        EXPECT_EQ(m.mean_abs, m.abs_mean) << c10::toString(dtype) << n;
        const double wanted = each.to(dtype).to(at::kDouble).abs().mean().item<double>();
        EXPECT_NEAR(m.mean_abs, wanted, 1e-6 * wanted);
      }
    }
  }
}

TEST(Metrics, OneValueOfTheOtherSignPartsTheMeans) {
  for (int64_t n : {3, 1000, 5000, 100000}) {
    at::Tensor x = at::ones({n});
    x[n / 2] = -0.01;
    const TensorMetrics m = measure(x);
    EXPECT_NEAR((m.mean_abs - m.abs_mean) * n, 0.02, 2e-3) << n;
  }
}

bool same_bits(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void expect_same(const TensorMetrics& a, const TensorMetrics& b) {
  EXPECT_TRUE(same_bits(a.mean_abs, b.mean_abs) && same_bits(a.abs_mean, b.abs_mean) && same_bits(a.std, b.std));
  EXPECT_TRUE(same_bits(a.abs_max, b.abs_max) && same_bits(a.abs_min, b.abs_min));
  EXPECT_EQ(a.numel, b.numel);
  EXPECT_EQ(a.nan_count, b.nan_count);
  EXPECT_EQ(a.inf_count, b.inf_count);
  EXPECT_EQ(a.zero_count, b.zero_count);
  ASSERT_EQ(a.histogram.has_value(), b.histogram.has_value());
  if (a.histogram) EXPECT_EQ(a.histogram->counts, b.histogram->counts);
}

TEST(Metrics, TensorsAddedAreMeasuredAsOne) {
  at::manual_seed(12);
  std::vector<at::Tensor> parts;
  for (int64_t n : {1, 70000, 50, 0, 300}) parts.push_back(at::randn({n}) * 3 + 1);
  parts[2][3] = 0;
  MetricsSum sum({.histogram = true}), first({.histogram = true}), rest({.histogram = true});
  for (size_t i = 0; i < parts.size(); ++i) sum.add(parts[i]), (i < 2 ? first : rest).add(parts[i]);
  const at::Tensor all = at::cat(parts);
  expect_torch(sum.metrics(), all);
  first.add(rest);
  expect_torch(first.metrics(), all);
  EXPECT_EQ(sum.metrics().zero_count, 1);
  EXPECT_EQ(sum.metrics().histogram->counts, measure(all, {.histogram = true}).histogram->counts);
  for (const at::Tensor& x : {parts[1], parts[0], parts[3]}) {
    MetricsSum one({.histogram = true});
    one.add(x);
    expect_same(one.metrics(), measure(x, {.histogram = true}));
  }
}

TEST(Metrics, SparseTensorsCountWithTheirZeros) {
  at::manual_seed(9);
  const auto rows = at::randint(500, {1, 40}, at::kLong);  // some more than once: their values add up
  const at::Tensor sparse = at::sparse_coo_tensor(rows, at::randn({40, 16}), {500, 16});
  for (const at::Tensor& x : {sparse, sparse.coalesce(),
                              at::sparse_coo_tensor(at::empty({1, 0}, at::kLong), at::empty({0, 16}), {500, 16})}) {
    const auto m = measure(x, {.histogram = true}), dense = measure(x.to_dense(), {.histogram = true});
    EXPECT_NEAR(m.mean_abs, dense.mean_abs, 1e-7);
    EXPECT_NEAR(m.abs_mean, dense.abs_mean, 1e-7);
    EXPECT_NEAR(m.std, dense.std, 1e-7);
    EXPECT_EQ(m.abs_max, dense.abs_max);
    EXPECT_EQ(m.abs_min, dense.abs_min);
    EXPECT_EQ(m.numel, dense.numel);
    EXPECT_EQ(m.zero_count, dense.zero_count);
    EXPECT_EQ(m.histogram->counts, dense.histogram->counts);
  }
}

TEST(Metrics, NaNAndInfinityInOneTensorAreInTheSum) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {inf, -inf, std::numeric_limits<double>::quiet_NaN()}) {
    for (const at::Tensor& other : {at::randn({9}), at::full({1}, inf), at::empty({0})}) {
      const at::Tensor x = at::full({1}, bad);
      MetricsSum sum;
      sum.add(other);
      sum.add(x);
      expect_same(sum.metrics(), measure(at::cat({other, x})));
    }
  }
  MetricsSum nothing;
  EXPECT_EQ(nothing.metrics().numel, 0);
  EXPECT_TRUE(std::isnan(nothing.metrics().std));
  EXPECT_THROW(nothing.add(at::empty({3}, at::kMeta)), Error);
}

TEST(Metrics, DoNotDependOnThreads) {
  at::manual_seed(7);
  at::Tensor x = at::randn({3000000});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  TensorMetrics one = measure(x, {.histogram = true});
  at::set_num_threads(4);
  TensorMetrics four = measure(x, {.histogram = true});
  at::set_num_threads(threads);
  EXPECT_EQ(one.std, four.std);
  EXPECT_EQ(one.mean_abs, four.mean_abs);
  EXPECT_EQ(one.abs_mean, four.abs_mean);
  EXPECT_EQ(one.histogram->counts, four.histogram->counts);
}

TEST(Metrics, SharesSayWhatAFormatWouldDo) {
  at::manual_seed(8);
  at::Tensor x = at::randn({400000}) * 0.01;
  x.slice(0, 0, 1000).zero_();
  x.slice(0, 2000, 3000).mul_(1e5);
  TensorMetrics m = measure(x, {.histogram = true});
  for (const char* text : {"E4M3-RN", "e5m2-RN", "E2M1-RN", "E4M3-RZ", "e4m3fn-RN", "fp16-RN", "E3M2-RZ"}) {
    const FPFormat format = FPFormat::parse(text);
    at::Tensor y = quantise(x, format);
    const double under = ((y == 0) & (x != 0)).to(at::kDouble).mean().item<double>();
    const double over = (x.abs() > format.max_absolute_value()).to(at::kDouble).mean().item<double>();
    const double sub = ((x.abs() < format.min_absolute_normal()) & (y != 0)).to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(m.underflow_share(format), under, 1e-9) << text;
    EXPECT_NEAR(m.overflow_share(format), over, 2e-4) << text;
    EXPECT_NEAR(m.subnormal_share(format), sub, 1e-9) << text;
  }
  const FPFormat chance = FPFormat::parse("E4M3-SR");
  at::Tensor y = quantise(x, chance, 1);
  EXPECT_NEAR(m.underflow_share(chance), ((y == 0) & (x != 0)).to(at::kDouble).mean().item<double>(), 2e-3);
  EXPECT_EQ(measure(at::full({8}, 240.0), {.histogram = true}).overflow_share(FPFormat::parse("E4M3")), 0);
  EXPECT_THROW(measure(x).underflow_share(chance), Error);
}

}  // namespace
}  // namespace plumb
