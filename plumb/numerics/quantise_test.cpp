#include "plumb/numerics/quantise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/reference_testing.h"
#include "plumb/numerics/values_testing.h"

namespace plumb {
namespace {

using namespace values_testing;

struct Range {
  at::ScalarType dtype;
  int mantissa_bits;
  double max;
};
const Range kFloat{at::kFloat, 23, std::numeric_limits<float>::max()};
const Range kDouble{at::kDouble, 52, std::numeric_limits<double>::max()};
const Range kHalf{at::kHalf, 10, 65504.0};
const Range kBFloat16{at::kBFloat16, 7, 0x1.fep127};

// Every level of the kernels that this CPU runs, on x's memory.
std::vector<at::Tensor> on_all_levels(const at::Tensor& x, const FPFormat& format, uint64_t seed = 0) {
  const kernel::KernelTable* tables[3];
  const int n = kernel::runnable_kernels(tables);
  std::vector<at::Tensor> results;
  const auto carrier = carrier_of(x.scalar_type(), "test");
  for (int i = 0; i < n; ++i) {
    at::Tensor y = at::empty_like(x);
    tables[i]->round[carrier](x.const_data_ptr(), y.mutable_data_ptr(), x.numel(), rounding_spec(format, carrier), seed,
                              0, nullptr, nullptr);
    results.push_back(y);
  }
  return results;
}

void expect_reference(const at::Tensor& x, const Range& range) {
  const at::Tensor wide = x.to(at::kDouble);
  const double* in = wide.const_data_ptr<double>();
  for (const char* text : kFormats) {
    const FPFormat format = FPFormat::parse(text);
    std::vector<double> expected(size_t(x.numel()));
    for (int64_t i = 0; i < x.numel(); ++i)
      expected[size_t(i)] = reference::round(in[i], format, range.mantissa_bits, range.max);
    for (const auto& y : on_all_levels(x, format)) {
      const at::Tensor got = y.to(at::kDouble);
      const double* out = got.const_data_ptr<double>();
      int wrong = 0;
      for (int64_t i = 0; i < x.numel() && wrong < 5; ++i)
        if (!reference::same(out[i], expected[size_t(i)])) {
          ++wrong;
          ADD_FAILURE() << text << " " << range.dtype << ": " << in[i] << " became " << out[i] << ", not "
                        << expected[size_t(i)];
        }
    }
  }
}

TEST(Quantise, AllHalfValuesInAllFormats) { expect_reference(all_16_bit_values(at::kHalf), kHalf); }

TEST(Quantise, AllBFloat16ValuesInAllFormats) { expect_reference(all_16_bit_values(at::kBFloat16), kBFloat16); }

TEST(Quantise, FloatsAroundEveryTurnOfEveryExponent) { expect_reference(float_grid(), kFloat); }

TEST(Quantise, RandomFloatBits) {
  at::manual_seed(1);
  expect_reference(at::randint(-2147483648LL, 2147483647LL, {20000}, at::kInt).view(at::kFloat), kFloat);
}

TEST(Quantise, DoublesRoundOnceAndNotThroughFloat) {
  // Just above a tie: float would lose the last bit and the tie would go to even.
  at::Tensor x = at::tensor({1.0625 + 1e-12, -1.0625 - 1e-12, 1.0625, 1.0625 - 1e-12}, at::kDouble);
  EXPECT_TRUE(at::equal(quantise(x, FPFormat::parse("E4M3")), at::tensor({1.125, -1.125, 1.0, 1.0}, at::kDouble)));
  at::manual_seed(2);
  at::Tensor wide =
      at::cat({at::randn({5000}, at::kDouble) * at::exp2(at::randint(-150, 150, {5000}, at::kDouble)),
               float_grid().to(at::kDouble),
               at::tensor({1e308, -1e308, 5e-324, -5e-324, 1e-300, 3.5e38, 65519.999, 65520.0}, at::kDouble)});
  expect_reference(wide, kDouble);
}

TEST(Quantise, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  at::Tensor x = at::tensor({inf, -inf, nan, 0.0f, -0.0f, 1e30f, -1e30f, 1e-30f, -1e-30f, -1e-40f});
  auto check = [&](const char* format, std::vector<double> expected) {
    at::Tensor y = quantise(x, FPFormat::parse(format));
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(reference::same(y[int64_t(i)].item<double>(), expected[i]))
          << format << " " << i << " " << y[int64_t(i)];
  };
  check("E4M3", {240, -240, nan, 0., -0., 240, -240, 0., -0., -0.});
  check("e4m3fn", {448, -448, nan, 0., -0., 448, -448, 0., -0., -0.});
  check("e4m3fn-RN-inf", {nan, nan, nan, 0., -0., nan, nan, 0., -0., -0.});
  check("e4m3fnuz", {240, -240, nan, 0., 0., 240, -240, 0., 0., 0.});
  check("e5m2-RN-inf", {inf, -inf, nan, 0., -0., inf, -inf, 0., -0., -0.});
  check("fp16", {inf, -inf, nan, 0., -0., inf, -inf, 0., -0., -0.});
  check("fp16-RZ", {inf, -inf, nan, 0., -0., 65504, -65504, 0., -0., -0.});
}

TEST(Quantise, AQuantisedTensorStaysAsItIs) {
  at::manual_seed(3);
  at::Tensor x = at::randn({10000}) * 100;
  for (const char* text : {"E4M3-SR", "E3M0-SR", "E8M3-SR", "E8M0-SR", "e4m3fnuz-SR", "bf16-SR", "fp16-SR4", "E5M2-SR1",
                           "E4M3-RN", "E4M3-RZ", "E8M3-RN"}) {
    at::Tensor once = quantise(x, FPFormat::parse(text));
    EXPECT_TRUE(at::equal(quantise(once, FPFormat::parse(text)), once)) << text;
  }
}

// --- stochastic

TEST(Stochastic, GoesToOneOfTheTwoNeighborsAndIsRightInTheMean) {
  for (const char* text : {"E4M3-SR", "E2M1-SR5", "E3M0-SR", "E8M2-SR", "e4m3fnuz-SR", "e5m2-SR-inf", "bf16-SR"}) {
    const FPFormat format = FPFormat::parse(text);
    for (double value :
         {1.35, -1.35, 0.3, 0.2 * format.min_absolute_subnormal(), -1.7 * format.min_absolute_subnormal(),
          2.8 * format.min_absolute_normal(), 0.9 * format.min_absolute_normal()}) {
      const int n = 40000;
      at::Tensor x = at::full({n}, value, at::kFloat);
      const double v = x[0].item<double>();
      const double down = reference::round(v, format.with_rounding(Rounding::TowardZero));
      const double sign = v < 0 ? -1 : 1;
      at::Tensor y = quantise(x, format, 7).to(at::kDouble);
      const double far = sign > 0 ? y.max().item<double>() : y.min().item<double>();
      const int64_t low = (y == down).sum().item<int64_t>(), high = (y == far).sum().item<int64_t>();
      EXPECT_EQ(low + high, n) << text << " " << value;
      // The far neighbor is the next value of the format.
      EXPECT_EQ(reference::round((down + far) / 2, format.with_rounding(Rounding::TowardZero)), down) << text;
      EXPECT_EQ(reference::round(far, format.with_rounding(Rounding::TowardZero)), far) << text;
      const double p = (v - down) / (far - down), steps = std::ldexp(1.0, -std::min(format.srbits, 20));
      EXPECT_NEAR(double(high) / n, p, 4 * std::sqrt(p * (1 - p) / n) + steps / 2) << text << " " << value;
    }
  }
}

TEST(Stochastic, TheSeedDecidesOverAnyThreadsLevelsAndDtypes) {
  at::manual_seed(4);
  const FPFormat format = FPFormat::parse("E4M3-SR");
  at::Tensor x = at::randn({300000}).to(at::kBFloat16).to(at::kFloat);
  const int threads = at::get_num_threads();
  at::Tensor first = quantise(x, format, 11);
  at::set_num_threads(4);
  EXPECT_TRUE(at::equal(quantise(x, format, 11), first));
  at::set_num_threads(1);
  EXPECT_TRUE(at::equal(quantise(x, format, 11), first));
  at::set_num_threads(threads);
  for (const auto& y : on_all_levels(x, format, 11)) EXPECT_TRUE(at::equal(y, first));
  EXPECT_TRUE(at::equal(quantise(x.to(at::kDouble), format, 11).to(at::kFloat), first));
  EXPECT_TRUE(at::equal(quantise(x.to(at::kBFloat16), format, 11).to(at::kFloat), first));
  EXPECT_FALSE(at::equal(quantise(x, format, 12), first));
  // The prefix of a tensor is rounded as the tensor's prefix.
  EXPECT_TRUE(at::equal(quantise(x.slice(0, 0, 20001), format, 11), first.slice(0, 0, 20001)));
}

TEST(Stochastic, WithoutASeedTorchsGeneratorDecides) {
  const FPFormat format = FPFormat::parse("E4M3-SR");
  at::Tensor x = at::randn({1000});
  at::manual_seed(5);
  at::Tensor a = quantise(x, format), b = quantise(x, format);
  at::manual_seed(5);
  EXPECT_TRUE(at::equal(quantise(x, format), a));
  EXPECT_FALSE(at::equal(a, b));
}

TEST(Stochastic, NearestLeavesTheGeneratorAlone) {
  at::manual_seed(6);
  at::Tensor expected = at::rand({4});
  at::manual_seed(6);
  quantise(at::randn({0}), FPFormat::parse("E4M3"));
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST(Stochastic, LanesAndBlocksAreNotCopiesOfEachOther) {
  const FPFormat format = FPFormat::parse("E2M1-SR");
  at::Tensor y = quantise(at::full({65536}, 1.25), format, 1);
  at::Tensor blocks = y.view({4, 16384});
  for (int i = 1; i < 4; ++i) EXPECT_NEAR((blocks[0] == blocks[i]).to(at::kDouble).mean().item<double>(), 0.5, 0.02);
  at::Tensor rows = y.view({1024, 64});
  EXPECT_NEAR((rows.slice(0, 1) == rows.slice(0, 0, 1023)).to(at::kDouble).mean().item<double>(), 0.5, 0.01);
  EXPECT_NEAR((rows.slice(1, 1) == rows.slice(1, 0, 63)).to(at::kDouble).mean().item<double>(), 0.5, 0.01);
}

// --- tensors

TEST(Quantise, AnyStridesGiveTheSameValues) {
  at::manual_seed(7);
  const FPFormat format = FPFormat::parse("E4M3");
  at::Tensor x = at::randn({6, 5, 4}) * 10;
  at::Tensor expected = quantise(x, format);
  EXPECT_TRUE(at::equal(quantise(x.permute({2, 0, 1}), format), expected.permute({2, 0, 1})));
  EXPECT_EQ(quantise(x.permute({2, 0, 1}), format).strides(), x.permute({2, 0, 1}).strides());
  EXPECT_TRUE(at::equal(quantise(x.slice(1, 0, 5, 2), format), expected.slice(1, 0, 5, 2)));
  EXPECT_TRUE(at::equal(quantise(x.select(2, 1), format), expected.select(2, 1)));
  at::Tensor row = x.select(0, 0).select(0, 0);
  EXPECT_TRUE(at::equal(quantise(row.expand({3, 4}), format), quantise(row, format).expand({3, 4})));
  EXPECT_TRUE(at::equal(quantise(x.flip(0), format), expected.flip(0)));
  at::Tensor negated = at::_neg_view(x);
  EXPECT_TRUE(at::equal(quantise(negated, format), -expected));
}

TEST(Quantise, EmptyAndScalarTensors) {
  const FPFormat format = FPFormat::parse("E4M3");
  EXPECT_EQ(quantise(at::empty({0, 3}), format).sizes(), at::IntArrayRef({0, 3}));
  at::Tensor scalar = at::scalar_tensor(1.06);
  EXPECT_EQ(quantise(scalar, format).dim(), 0);
  EXPECT_EQ(quantise(scalar, format).item<float>(), 1.0f);
  EXPECT_EQ(quantise(at::empty({0}), FPFormat(4, 3)).numel(), 0);
}

TEST(Quantise, ALargeTensorIsRoundedAsItsParts) {
  at::manual_seed(9);
  for (auto dtype : {at::kFloat, at::kDouble})
    for (const char* text : {"E4M3-RN", "E4M3-RZ", "E4M3-SR"}) {
      const FPFormat format = FPFormat::parse(text);
      const int64_t n = (int64_t(4) << 20) + 12345, part = 16 * kernel::kRandomBlock;
      at::Tensor x = at::randn({n}, dtype), whole = quantise(x, format, 5);
      at::Tensor one_by_one = at::empty_like(x);
      const auto carrier = carrier_of(dtype, "test");
      const auto spec = rounding_spec(format, carrier);
      for (int64_t i = 0; i < n; i += part)
        kernel::kernels().round[carrier](
            static_cast<const char*>(x.const_data_ptr()) + i * int64_t(x.element_size()),
            static_cast<char*>(one_by_one.mutable_data_ptr()) + i * int64_t(x.element_size()), std::min(part, n - i),
            spec, 5, i / kernel::kRandomBlock, nullptr, nullptr);
      EXPECT_TRUE(at::equal(whole, one_by_one)) << text;
      for (const auto& y : on_all_levels(x, format, 5)) EXPECT_TRUE(at::equal(y, whole)) << text;
    }
}

TEST(Quantise, LeavesItsInputAlone) {
  at::Tensor x = at::randn({100}), kept = x.clone();
  quantise(x, FPFormat::parse("E2M1"));
  quantise(x.slice(0, 0, 100, 3), FPFormat::parse("E2M1"));
  EXPECT_TRUE(at::equal(x, kept));
}

TEST(Quantise, IntoAGivenTensor) {
  const FPFormat format = FPFormat::parse("E4M3");
  at::Tensor x = at::randn({20, 30}), expected = quantise(x, format);
  at::Tensor out = at::zeros({20, 30});
  quantise_out(out, x, format);
  EXPECT_TRUE(at::equal(out, expected));
  at::Tensor wide = at::zeros({20, 60}), strided = wide.slice(1, 0, 60, 2);
  quantise_out(strided, x, format);
  EXPECT_TRUE(at::equal(strided, expected));
  EXPECT_EQ(wide.slice(1, 1, 60, 2).abs().max().item<float>(), 0);
  at::Tensor transposed = at::zeros({30, 20}).t();
  quantise_out(transposed, x, format);
  EXPECT_TRUE(at::equal(transposed, expected));
  at::Tensor memory = at::randn({10}), low = memory.slice(0, 0, 6), high = memory.slice(0, 2, 8);
  at::Tensor shifted = quantise(high, format);
  quantise_out(low, high, format);
  EXPECT_TRUE(at::equal(low, shifted)) << "memory shared in part";
  at::Tensor same = x.clone();
  quantise_out(same, same, format);
  EXPECT_TRUE(at::equal(same, expected));
}

TEST(Quantise, InPlaceTellsAutogradThatMemoryChanged) {
  at::Tensor x = at::randn({50}), expected = quantise(x, FPFormat::parse("E4M3"));
  const auto before = x._version();
  quantise_(x, FPFormat::parse("E4M3"));
  EXPECT_TRUE(at::equal(x, expected));
  EXPECT_GT(x._version(), before);
  at::Tensor whole = at::randn({50}), part = whole.slice(0, 0, 50, 2),
             part_expected = quantise(part, FPFormat(4, 3), 1);
  at::Tensor rest = whole.slice(0, 1, 50, 2).clone();
  quantise_(part, FPFormat(4, 3), 1);
  EXPECT_TRUE(at::equal(part, part_expected));
  EXPECT_TRUE(at::equal(whole.slice(0, 1, 50, 2), rest));
}

TEST(Quantise, RefusesWithAWord) {
  const FPFormat format = FPFormat::parse("E4M3");
  EXPECT_THROW(quantise(at::arange(3), format), Error);
  EXPECT_THROW(quantise(at::Tensor(), format), Error);
  EXPECT_THROW(quantise(at::empty({2}, at::kComplexFloat), format), Error);
  EXPECT_THROW(quantise(at::empty({2}, at::kMeta), format), Error);
  EXPECT_THROW(quantise(at::eye(3).to_sparse(), format), Error);
  at::Tensor out = at::empty({3});
  EXPECT_THROW(quantise_out(out, at::randn({4}), format), Error);
  EXPECT_THROW(quantise_out(out, at::randn({3}, at::kDouble), format), Error);
  FPFormat wide = format, blockless = FPFormat::parse("mxfp8");
  wide.exponent_bits = 99;
  blockless.block_size = 0;
  EXPECT_THROW(quantise(at::ones({4}), wide), Error);
  EXPECT_THROW(quantise(at::ones({4}), blockless), Error);
  at::Tensor expanded = at::randn({1}).expand({4});
  EXPECT_THROW(quantise_(expanded, format), Error);
  EXPECT_THROW(quantise_out(expanded, at::randn({4}), format), Error);
}

TEST(Quantise, MeasuresOnTheWay) {
  at::manual_seed(8);
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const char* text : {"E4M3-RN", "E4M3-SR"}) {
      at::Tensor x = at::randn({400, 777}).to(dtype);
      TensorMetrics before, after;
      const FPFormat format = FPFormat::parse(text);
      at::Tensor y = quantise_and_measure(x, format, &before, &after, {.histogram = true}, 3);
      EXPECT_TRUE(at::equal(y, quantise(x, format, 3)));
      for (auto [got, of] : {std::pair(&before, &x), std::pair(&after, &y)}) {
        TensorMetrics expected = measure(*of, {.histogram = true});
        EXPECT_EQ(got->std, expected.std);
        EXPECT_EQ(got->mean_abs, expected.mean_abs);
        EXPECT_EQ(got->abs_max, expected.abs_max);
        EXPECT_EQ(got->zero_count, expected.zero_count);
        EXPECT_EQ(got->histogram->counts, expected.histogram->counts);
      }
    }
  at::Tensor x = at::randn({64, 64}).t().slice(0, 0, 64, 3);
  TensorMetrics after;
  EXPECT_TRUE(at::equal(quantise_and_measure(x, FPFormat::parse("E5M2"), nullptr, &after),
                        quantise(x, FPFormat::parse("E5M2"))));
  EXPECT_EQ(after.numel, x.numel());
}

}  // namespace
}  // namespace plumb
