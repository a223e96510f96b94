#include "plumb/numerics/blocks.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/reference_testing.h"

namespace plumb {
namespace {

const std::vector<const char*> kBlockFormats = {"mxfp8e4m3-RN", "mxfp8e5m2-RN",     "mxfp6e2m3-RN", "mxfp6e3m2-RN",
                                                "mxfp4-RN",     "nvfp4-RN",         "mxfp8e4m3-RZ", "mxfp8e5m2-RZ",
                                                "mxfp4-RZ",     "mxfp8e5m2-RN-inf", "nvfp4-RZ"};
using reference::kInf;
using reference::kNaN;

double largest_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: return 65504.0;
    case at::kBFloat16: return 0x1.fep127;
    case at::kDouble: return std::numeric_limits<double>::max();
    default: return std::numeric_limits<float>::max();
  }
}

// Along the last dimension, value by value. `T` is the type that is computed in.
template <class T>
at::Tensor by_definition(const at::Tensor& x, const FPFormat& format) {
  const double carrier = largest_of(x.scalar_type());
  const at::Tensor rows = x.to(at::kDouble).contiguous();
  at::Tensor out = at::empty_like(rows);
  const double* in = rows.const_data_ptr<double>();
  double* result = out.mutable_data_ptr<double>();
  auto magnitude = [&](double v) { return std::isnan(v) ? 0.0 : std::min(std::fabs(v), carrier); };
  double all = 0;
  for (int64_t i = 0; i < rows.numel(); ++i) all = std::max(all, magnitude(in[i]));
  const double unit = std::max<double>(T(all / (6.0 * 448.0)), 0x1p-126);
  const int64_t length = rows.dim() == 0 ? 1 : rows.size(-1);
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const int64_t row = i / length, first = row * length + i % length / format.block_size * format.block_size;
    const int64_t last = std::min(first + format.block_size, (row + 1) * length);
    double largest = 0;
    for (int64_t k = first; k < last; ++k) largest = std::max(largest, magnitude(in[k]));
    T scale;
    if (format.block_scale == BlockScale::PowerOfTwo) {
      const int e = largest == 0 ? -127 : std::ilogb(largest) - format.max_exponent();
      scale = T(std::ldexp(1.0, std::min(127, std::max(-127, e))));
    } else {
      const T wanted = T(T(largest) / T(6)) / T(unit);
      scale = T(T(reference::round(double(wanted), FPFormat::parse("e4m3fn-RN"))) * T(unit));
    }
    const T element = scale == 0 ? T(std::isnan(in[i]) ? kNaN : std::copysign(0.0, in[i])) : T(T(in[i]) / scale);
    T y = T(T(reference::round(double(element), format.element(), 52, 1e300)) * scale);
    if (format.block_scale == BlockScale::E4M3 && std::fabs(double(y)) > carrier) y = T(std::copysign(carrier, y));
    result[i] = double(y);
  }
  return out.to(x.scalar_type());
}

at::Tensor by_definition(const at::Tensor& x, const FPFormat& format) {
  return x.scalar_type() == at::kDouble ? by_definition<double>(x, format) : by_definition<float>(x, format);
}

void expect_same(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  const at::Tensor a = got.to(at::kDouble).contiguous(), b = expected.to(at::kDouble).contiguous();
  int wrong = 0;
  for (int64_t i = 0; i < a.numel() && wrong < 3; ++i) {
    if (reference::same(a.const_data_ptr<double>()[i], b.const_data_ptr<double>()[i])) continue;
    ++wrong;
    ADD_FAILURE() << what << " at " << i << ": " << a.const_data_ptr<double>()[i] << ", not "
                  << b.const_data_ptr<double>()[i];
  }
}

// Rows of very different sizes, with every special value somewhere.
at::Tensor difficult(at::ScalarType dtype, int64_t length) {
  at::manual_seed(3);
  at::Tensor x = at::randn({40, length}, at::kDouble) * at::exp2(at::arange(-30, 50, 2, at::kDouble)).unsqueeze(1);
  const double tiny = dtype == at::kDouble ? 5e-324 : dtype == at::kHalf ? 6e-8 : 1.5e-45;
  const double special[] = {0.0, -0.0, kInf, -kInf, kNaN, tiny, -tiny, 3 * tiny, largest_of(dtype), -largest_of(dtype)};
  for (int64_t i = 0; i < 10; ++i) x[20 + i][i % length] = special[i];
  x[30].zero_();
  x[31].fill_(kNaN);
  x[32].fill_(-kInf);
  x[33].fill_(tiny);
  x[34].fill_(-largest_of(dtype));
  x[35].fill_(-0.0);
  return x.to(dtype);
}

TEST(Blocks, FollowTheirDefinitionInEveryTypeAndLength) {
  for (const char* text : kBlockFormats) {
    const FPFormat format = FPFormat::parse(text);
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (int64_t length : {64, 32, 1, 7, 33, 100}) {
        const at::Tensor x = difficult(dtype, length);
        // One number for the whole tensor would be infinity's: the special values apart.
        for (const auto& part : {x.narrow(0, 0, 20), x.narrow(0, 20, 20)})
          expect_same(quantise(part, format), by_definition(part, format),
                      std::string(text) + " " + c10::toString(dtype) + " " + std::to_string(length));
      }
    }
  }
}

TEST(Blocks, AllHalfAndBFloat16ValuesAreRight) {
  for (auto dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor x = at::arange(65536, at::kInt).to(at::kShort).view(dtype);
    for (const char* text : kBlockFormats)
      expect_same(quantise(x, FPFormat::parse(text)), by_definition(x, FPFormat::parse(text)), text);
  }
}

TEST(Blocks, RunAlongAnyDimension) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({6, 40, 34});
  for (const char* text : {"mxfp8-RN", "nvfp4-RN"}) {
    const FPFormat format = FPFormat::parse(text);
    for (int64_t dim = -3; dim < 3; ++dim) {
      const at::Tensor expected = quantise(x.movedim(dim, -1).contiguous(), format).movedim(-1, dim);
      const at::Tensor got = quantise(x, format, std::nullopt, dim);
      EXPECT_TRUE(at::equal(got, expected)) << text << dim;
      EXPECT_EQ(got.strides(), x.strides());
      EXPECT_TRUE(at::equal(quantise(x.transpose(0, 1), format, std::nullopt, dim),
                            quantise(x.transpose(0, 1).contiguous(), format, std::nullopt, dim)));
    }
    EXPECT_THROW(quantise(x, format, std::nullopt, 3), Error);
    EXPECT_THROW(quantise(x, format, std::nullopt, -4), Error);
  }
}

TEST(Blocks, TakeNumbersEmptyTensorsAndGivenMemory) {
  const FPFormat format = FPFormat::parse("mxfp4-RN");
  EXPECT_EQ(quantise(at::scalar_tensor(5.4), format).item<float>(), 6.0f);
  EXPECT_EQ(quantise(at::empty({0}), format).numel(), 0);
  EXPECT_EQ(quantise(at::empty({3, 0}), format).sizes(), at::IntArrayRef({3, 0}));
  const at::Tensor x = at::randn({4, 50});
  at::Tensor out = at::empty_like(x), same = x.clone(), columns = at::empty({50, 4}).t();
  quantise_out(out, x, format);
  quantise_(same, format);
  quantise_out(columns, x, format);
  EXPECT_TRUE(at::equal(out, quantise(x, format)));
  EXPECT_TRUE(at::equal(same, out));
  EXPECT_TRUE(at::equal(columns, out));
  TensorMetrics before, after;
  EXPECT_TRUE(at::equal(quantise_and_measure(x, format, &before, &after), out));
  EXPECT_EQ(after.abs_max, out.abs().max().item<double>());
}

TEST(Blocks, AValueThatIsRoundedStaysAsItIs) {
  at::manual_seed(5);
  const at::Tensor x = at::randn({50, 64});
  for (const char* text : {"mxfp8e4m3", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4"}) {
    const at::Tensor once = quantise(x, FPFormat::parse(text));
    EXPECT_TRUE(at::equal(quantise(once, FPFormat::parse(text)), once)) << text;
  }
}

TEST(Blocks, ChanceIsFairAndDoesNotDependOnThreads) {
  at::manual_seed(6);
  // The first of each block is its largest, and no value is beyond the largest element.
  at::Tensor x = at::rand({300, 320}) * 2.9 - 1.45;
  x.slice(1, 0, std::nullopt, 16).fill_(1.5);
  for (const char* text : {"mxfp8e4m3-SR", "mxfp4-SR", "nvfp4-SR"}) {
    const FPFormat format = FPFormat::parse(text), down = format.with_rounding(Rounding::TowardZero);
    const int threads = at::get_num_threads();
    at::set_num_threads(3);
    const at::Tensor several = quantise(x, format, 7);
    at::set_num_threads(1);
    EXPECT_TRUE(at::equal(several, quantise(x, format, 7))) << text;
    at::set_num_threads(threads);
    EXPECT_FALSE(at::equal(several, quantise(x, format, 8))) << text;
    at::Tensor mean = at::zeros_like(x);
    for (int64_t i = 0; i < 200; ++i) mean += quantise(x, format, i) / 200;
    const at::Tensor low = quantise(x, down);
    const double bias = (mean - x).mean().item<double>(), floor = (low - x).abs().mean().item<double>();
    EXPECT_LT(std::fabs(bias), floor * 0.1) << text;
  }
}

TEST(Blocks, CodesDecodeToTheQuantisedValues) {
  for (const char* text : kBlockFormats) {
    const FPFormat format = FPFormat::parse(text);
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (int64_t length : {64, 50}) {
        at::Tensor x = difficult(dtype, length).narrow(0, 0, 20);
        const auto codes = encode_blocks(x, format);
        EXPECT_EQ(codes.scales.sizes(), at::IntArrayRef({20, (length + format.block_size - 1) / format.block_size}));
        expect_same(decode_blocks(codes, format, dtype) + 0.0, quantise(x, format) + 0.0, text);
        const auto columns = encode_blocks(x, format, std::nullopt, 0);
        expect_same(decode_blocks(columns, format, dtype, 0) + 0.0, quantise(x, format, std::nullopt, 0) + 0.0, text);
      }
    }
  }
  EXPECT_THROW(encode(at::ones({4}), FPFormat::parse("mxfp8")), Error);
  EXPECT_THROW(encode_blocks(at::ones({4}), FPFormat::parse("e4m3fn")), Error);
}

TEST(Blocks, OperatorsTakeTheirNames) {
  at::manual_seed(8);
  const at::Tensor x = at::randn({8, 48});
  for (const char* text : {"mxfp8", "mxfp8e5m2", "mxfp6", "mxfp6e3m2", "mxfp4", "mxfp4e2m1", "nvfp4"}) {
    const FPFormat format = FPFormat::parse(text);
    EXPECT_EQ(FPFormat::parse(format.to_string()), format) << text;
    EXPECT_TRUE(at::equal(ops::quantise(x, text), quantise(x, format)));
    EXPECT_TRUE(at::equal(ops::quantise(x, text, "", 0, std::nullopt, 0), quantise(x, format, std::nullopt, 0)));
  }
}

TEST(Blocks, SharedScalesNeitherOverflowNorLoseTheLargest) {
  at::manual_seed(9);
  const at::Tensor x = at::randn({100000}) * 1e-6;
  const auto m = measure(x, {.histogram = true});
  const FPFormat block = FPFormat::parse("mxfp8e4m3"), plain = FPFormat::parse("e4m3fn");
  EXPECT_EQ(m.overflow_share(block), 0);
  EXPECT_GT(m.underflow_share(plain), 0.9);
  EXPECT_LT(m.underflow_share(block), 0.01);
  const double zeros = (quantise(x, block) == 0).to(at::kDouble).mean().item<double>();
  EXPECT_LE(zeros, m.underflow_share(block));
}

}  // namespace
}  // namespace plumb
