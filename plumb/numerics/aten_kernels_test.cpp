#include "plumb/numerics/aten_kernels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>

#include "plumb/numerics/blocks.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/metrics.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/values_testing.h"

namespace plumb {
namespace {

using namespace values_testing;

// Equal bits; any NaN equals any other.
void expect_equal_bits(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  EXPECT_EQ(got.strides(), expected.strides()) << what;
  const auto numbers = [](const at::Tensor& x) {
    return at::isFloatingType(x.scalar_type()) ? x.masked_fill(x.isnan(), 12345) : x;
  };
  const auto bits = [](const at::Tensor& x) {
    const at::Tensor flat = x.contiguous();
    return flat.numel() == 0 ? flat : flat.view({-1}).view(at::kByte);
  };
  EXPECT_TRUE(at::equal(bits(numbers(got)), bits(numbers(expected)))) << what;
}

const std::vector<const char*> kByChance = {
    "E4M3-SR", "E2M1-SR5", "E3M0-SR",  "E2M0-SR",  "E8M2-SR",  "E8M0-SR1", "e4m3fnuz-SR", "e5m2-SR-inf",
    "bf16-SR", "E5M21-SR", "fp16-SR4", "E7M10-SR", "E8M22-SR", "fp32-SR",  "e2m1fn-SR",   "e4m3fn-SR3-inf"};

std::vector<at::Tensor> values_of_all_carriers() {
  at::manual_seed(1);
  const at::Tensor random = at::randint(-2147483648LL, 2147483647LL, {20000}, at::kInt).view(at::kFloat);
  const at::Tensor wide =
      at::cat({at::randn({5000}, at::kDouble) * at::exp2(at::randint(-150, 150, {5000}, at::kDouble)),
               float_grid().to(at::kDouble), float_grid().to(at::kDouble) * (1 + 0x1p-40),
               at::tensor({1e308, -1e308, 5e-324, -5e-324, 1e-300, 3.5e38, 65519.999, 65520.0}, at::kDouble)});
  return {all_16_bit_values(at::kHalf), all_16_bit_values(at::kBFloat16), float_grid(), random, wide};
}

TEST(AtenKernels, RoundEveryValueToTheBitsOfTheCpu) {
  const auto all = values_of_all_carriers();
  for (const at::Tensor& x : all) {
    for (const char* text : kFormats) {
      const FPFormat format = FPFormat::parse(text);
      expect_equal_bits(aten_kernels::quantise(x, format, 0), quantise(x, format), text);
    }
  }
}

TEST(AtenKernels, RoundByChanceToTheBitsOfTheCpu) {
  const auto all = values_of_all_carriers();
  for (const at::Tensor& x : all) {
    for (const char* text : kByChance) {
      const FPFormat format = FPFormat::parse(text);
      for (uint64_t seed : {uint64_t(3), ~uint64_t(5)})
        expect_equal_bits(aten_kernels::quantise(x, format, seed), quantise(x, format, seed), text);
    }
  }
}

TEST(AtenKernels, TakeAnyStrides) {
  at::manual_seed(7);
  const at::Tensor x = at::randn({6, 50, 4}) * 10;
  for (const char* text : {"E4M3-RN", "E4M3-SR", "E5M2-RZ"}) {
    const FPFormat format = FPFormat::parse(text);
    for (const at::Tensor& view :
         {x.permute({2, 0, 1}), x.slice(1, 0, 50, 2), x.select(2, 1), x.slice(2, 1, 4).permute({1, 2, 0}),
          x.select(0, 0).expand({3, 50, 4}), x.flip(0), at::_neg_view(x), x.slice(0, 0, 0), x.select(0, 0)[0][0]}) {
      expect_equal_bits(aten_kernels::quantise(view, format, 9), quantise(view, format, 9), text);
      expect_equal_bits(aten_kernels::encode(view, format, 9), encode(view, format, 9), text);
    }
  }
}

// Salmon et al. 2011, written down once more, word by word.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p = uint64_t(0xD2511F53u) * c[0], q = uint64_t(0xCD9E8D57u) * c[2];
    c = {uint32_t(q >> 32) ^ c[1] ^ k0, uint32_t(q), uint32_t(p >> 32) ^ c[3] ^ k1, uint32_t(p)};
  }
  return c;
}

TEST(AtenKernels, RandomWordsArePhiloxOfSeedAndPlace) {
  // The results that the authors' library is tested with.
  EXPECT_EQ(philox({0, 0, 0, 0}, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffff, 0xffffffff),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  const uint64_t seed = 0xfedcba9876543210;
  const at::Tensor words = aten_kernels::random_words(1000, seed, at::kCPU);
  for (int64_t i = 0; i < 1000; ++i) {
    const auto four = philox({uint32_t(i / 256 * 64 + i % 64), 0, 0, 0x706c6d62}, uint32_t(seed), uint32_t(seed >> 32));
    ASSERT_EQ(words[i].item<int64_t>(), int64_t(four[size_t(i % 256 / 64)])) << i;
  }
  EXPECT_EQ(aten_kernels::random_words(0, seed, at::kCPU).numel(), 0);
}

TEST(AtenKernels, CodesAreThoseOfTheCpu) {
  const auto all = values_of_all_carriers();
  const at::Tensor codes = at::arange(256, at::kByte);
  for (const char* text :
       {"E4M3", "E5M2", "E3M4", "E2M1", "E7M0", "E2M0", "e4m3fn", "e5m2", "e5m2-inf", "e4m3fn-inf", "e4m3fnuz",
        "e5m2fnuz", "e3m4", "e2m1fn", "e2m3fn", "e3m2fn", "E4M3-SR", "e5m2-SR", "e4m3fnuz-RZ"}) {
    const FPFormat format = FPFormat::parse(text);
    for (const at::Tensor& x : all) expect_equal_bits(aten_kernels::encode(x, format, 4), encode(x, format, 4), text);
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      expect_equal_bits(aten_kernels::decode(codes, format, dtype), decode(codes, format, dtype), text);
      const at::Tensor turned = codes.view({16, 16}).t();
      expect_equal_bits(aten_kernels::decode(turned, format, dtype), decode(turned, format, dtype), text);
    }
  }
}

void expect_equal_blocks(const at::Tensor& x, const FPFormat& format, uint64_t seed, const std::string& what) {
  const at::Tensor rows = x.contiguous();
  const auto got = aten_kernels::round_blocks(rows, format, seed, true);
  const BlockCodes expected = encode_blocks(rows, format, seed);
  expect_equal_bits(got.values, quantise_blocks(rows, format, seed, -1), what);
  expect_equal_bits(got.codes, expected.codes, what);
  expect_equal_bits(got.scales, expected.scales, what);
  EXPECT_EQ(got.unit.item().toDouble(), expected.tensor_scale.item<double>()) << what;
}

TEST(AtenKernels, BlocksAreThoseOfTheCpu) {
  at::manual_seed(3);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const char* text : {"mxfp8e4m3", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "nvfp4", "mxfp8e4m3-SR",
                           "mxfp4-SR", "nvfp4-SR", "mxfp8e4m3-RZ", "nvfp4-RZ", "mxfp8e5m2-RN-inf"}) {
    const FPFormat format = FPFormat::parse(text);
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (int64_t length : {1, 15, 16, 31, 32, 33, 100, 256}) {
        at::Tensor x = at::randn({7, length}, at::kDouble) * at::exp2(at::randint(-20, 20, {7, 1}, at::kDouble));
        x[1].zero_();
        x[2][0] = nan;
        expect_equal_blocks(x.to(dtype), format, 5, text);
        x[3][length / 2] = inf;
        x[4][0] = -inf;
        expect_equal_blocks(x.to(dtype), format, 5, text);
        x[5].fill_(nan);
        expect_equal_blocks(x.to(dtype), format, 5, text);
      }
      for (double scale : {1e-44, 1e-38, 1e-30, 1e30, 1e37})
        expect_equal_blocks((at::randn({3, 64}, at::kDouble) * scale).to(dtype), format, 6, text);
      for (const at::Tensor& x : {at::zeros({2, 40}), at::full({}, 1.7), at::empty({0, 5}), at::empty({3, 0})})
        expect_equal_blocks(x.to(dtype), format, 7, text);
    }
  }
}

void expect_metrics(const TensorMetrics& got, const at::Tensor& x, const char* what) {
  const TensorMetrics expected = measure(x, {.histogram = true});
  EXPECT_EQ(got.numel, expected.numel);
  EXPECT_EQ(got.nan_count, expected.nan_count);
  EXPECT_EQ(got.inf_count, expected.inf_count);
  EXPECT_EQ(got.zero_count, expected.zero_count);
  EXPECT_EQ(got.histogram->counts, expected.histogram->counts) << what;
  const auto near = [&](double a, double b, double bound, const char* name) {
    const bool same = a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= bound;
    EXPECT_TRUE(same) << what << " " << name << " " << a << " " << b;
  };
  near(got.abs_max, expected.abs_max, 0, "abs_max");
  near(got.abs_min, expected.abs_min, 0, "abs_min");
  near(got.mean_abs, expected.mean_abs, 1e-6 * expected.mean_abs, "mean_abs");
  near(got.abs_mean, expected.abs_mean, 1e-6 * expected.mean_abs, "abs_mean");
  near(got.std, expected.std, 1e-6 * expected.std, "std");
}

TEST(AtenKernels, MetricsAreThoseOfTheCpu) {
  at::manual_seed(4);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<at::Tensor> all = {
      at::randn({5000}) + 1e4, at::randn({3000}).relu(),  at::randn({300}) * 1e-20, at::randn({40, 50}).t(),
      at::full({70}, inf),     at::full({70}, nan),       at::zeros({9}),           at::empty({0, 3}),
      at::scalar_tensor(-3.0), float_grid().nan_to_num(1)};
  for (std::vector<double> specials : {std::vector{inf}, {-inf}, {inf, -inf}, {nan}, {nan, inf}}) {
    at::Tensor x = at::randn({1000});
    for (size_t i = 0; i < specials.size(); ++i) x[int64_t(i) * 7] = specials[i];
    all.push_back(x);
  }
  for (double scale : {1e-310, 1e-200, 1e-80, 1e80, 1e154, 1e200, 1e300})
    all.push_back((at::randn({500}, at::kDouble) + 0.3) * scale);
  for (const at::Tensor& values : all) {
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const at::Tensor x = values.to(dtype);
      expect_metrics(metrics_of_tensor(aten_kernels::tensor_metrics(x, true)), x, "operator");
      kernel::Partial partial;
      std::array<uint64_t, 256> counts{};
      partial.histogram = counts.data();
      aten_kernels::merge_gathered(partial, aten_kernels::gather_metrics(x, true));
      expect_metrics(finish_metrics(partial, x.numel()), x, "gathered");
    }
  }
  for (const at::Tensor& x : {at::arange(-50, 50), at::randn({100}) > 0, at::randn({1000}).to(at::kFloat8_e4m3fn)})
    expect_metrics(metrics_of_tensor(aten_kernels::tensor_metrics(x, true)), x, "other dtypes");
  EXPECT_EQ(aten_kernels::tensor_metrics(at::randn({4}), false).numel(), 9);
}

}  // namespace
}  // namespace plumb
