#include "plumb/numerics/codes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

const std::vector<const char*> kCodedFormats = {
    "E4M3",     "E5M2",   "E2M1",   "E3M2",   "E2M3",        "E3M0",          "E4M0",
    "E2M5",     "E6M1",   "E7M0",   "e4m3fn", "e5m2",        "e3m4",          "e4m3fnuz",
    "e5m2fnuz", "e2m1fn", "e2m3fn", "e3m2fn", "e5m2-RN-inf", "e4m3fn-RN-inf", "E4M3-RZ"};

bool equal_with_nan(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(at::isnan(a), at::isnan(b)) && at::equal(at::nan_to_num(a, 0), at::nan_to_num(b, 0));
}

TEST(Codes, EveryCodeDecodesAndEncodesToItself) {
  at::Tensor codes = at::arange(256).to(at::kByte);
  for (const char* text : kCodedFormats) {
    const FPFormat format = FPFormat::parse(text);
    at::Tensor values = decode(codes, format, at::kDouble);
    for (int c = 0; c < 256; ++c) {
      double expected = decode_one(uint8_t(c), format), got = values[c].item<double>();
      EXPECT_TRUE(std::isnan(expected) ? std::isnan(got)
                                       : got == expected && std::signbit(got) == std::signbit(expected));
      if (std::isnan(got) || (std::isinf(got) && format.saturate)) continue;
      uint8_t back = encode(values[c], format).item<uint8_t>();
      EXPECT_EQ(int(back), c) << text << " " << got;
    }
  }
}

TEST(Codes, DecodingAnEncodedTensorIsQuantisingIt) {
  at::manual_seed(1);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  at::Tensor all = at::arange(65536, at::kInt).to(at::kShort);
  at::Tensor doubles =
      at::cat({at::randn({5000}, at::kDouble) * 30, at::tensor({inf, -inf, nan, 0.0, 1e300, 1e-300}, at::kDouble)});
  for (const auto& x : {at::randn({40000}) * 10, all.view(at::kHalf), all.view(at::kBFloat16), doubles})
    for (const char* text : kCodedFormats) {
      const FPFormat format = FPFormat::parse(text);
      if (x.scalar_type() == at::kHalf && format.max_absolute_value() > 65504) continue;
      EXPECT_TRUE(equal_with_nan(decode(encode(x, format), format, x.scalar_type()), quantise(x, format)))
          << text << " " << x.scalar_type();
    }
}

TEST(Codes, StochasticCodesUseTheSameStream) {
  at::manual_seed(2);
  at::Tensor x = at::randn({100000});
  for (const char* text : {"E4M3-SR", "e5m2-SR4", "E3M2-SR"}) {
    const FPFormat format = FPFormat::parse(text);
    EXPECT_TRUE(at::equal(decode(encode(x, format, 9), format), quantise(x, format, 9))) << text;
  }
}

TEST(Codes, AgreeWithTorchsOwnFloat8) {
  at::Tensor codes = at::arange(256).to(at::kByte);
  for (auto [name, dtype] :
       {std::pair("e4m3fn", at::kFloat8_e4m3fn), std::pair("e5m2", at::kFloat8_e5m2),
        std::pair("e4m3fnuz", at::kFloat8_e4m3fnuz), std::pair("e5m2fnuz", at::kFloat8_e5m2fnuz)}) {
    EXPECT_TRUE(equal_with_nan(decode(codes, FPFormat::parse(name)), codes.view(dtype).to(at::kFloat))) << name;
    at::Tensor x = at::randn({10000}) * 3;
    EXPECT_TRUE(at::equal(encode(x, FPFormat::parse(name)), x.to(dtype).view(at::kByte))) << name;
  }
}

TEST(Codes, AnyStrides) {
  at::Tensor x = at::randn({20, 30});
  const FPFormat format = FPFormat::parse("E4M3");
  at::Tensor codes = encode(x, format);
  EXPECT_TRUE(at::equal(encode(x.t(), format), codes.t()));
  EXPECT_TRUE(at::equal(encode(x.slice(1, 0, 30, 4), format), codes.slice(1, 0, 30, 4)));
  EXPECT_TRUE(at::equal(decode(codes.t(), format), quantise(x, format).t()));
  EXPECT_TRUE(at::equal(decode(codes.slice(1, 0, 30, 4), format), quantise(x, format).slice(1, 0, 30, 4)));
  EXPECT_EQ(encode(at::empty({0}), format).numel(), 0);
  EXPECT_EQ(encode(at::scalar_tensor(1.0), format).dim(), 0);
}

TEST(PackedCodes, BringBackEveryValueOfAFormatAndItsZerosSigns) {
  at::Tensor x = at::cat({at::randn({2000}), at::tensor({0.0, -0.0, 1e9, -1e9, 1e-9, -1e-9})});
  for (const char* text : {"E4M3", "E5M2", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "E2M3"}) {
    const FPFormat format = FPFormat::parse(text);
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const at::Tensor values = quantise(x.to(dtype), format);
      const at::Tensor codes = pack_codes(values, format);
      ASSERT_TRUE(codes.defined());
      const at::Tensor back = unpack_codes(codes, format, dtype);
      EXPECT_TRUE(at::equal(back, values)) << text;
      EXPECT_TRUE(at::equal(at::signbit(back), at::signbit(values))) << text;
    }
  }
}

TEST(PackedCodes, MadeWhileRoundingAreThoseMadeAfterwards) {
  at::manual_seed(12);
  at::Tensor x = at::cat({at::randn({70000}), at::tensor({0.0, -0.0, 1e9, -1e9, 1e-9, -1e-9})});
  for (const char* text : {"E4M3-SR", "E5M2", "e4m3fn", "e5m2-inf", "e4m3fnuz", "e2m1fn", "E2M3-SR"}) {
    const FPFormat format = FPFormat::parse(text);
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const at::Tensor& values :
           {x.to(dtype), x.to(dtype).slice(0, 0, 70000).view({200, 350}).t(), x.to(dtype).slice(0, 0, 70000, 3)}) {
        const auto [rounded, codes] = quantise_and_pack(values, format, 7);
        const at::Tensor expected = quantise(values, format, 7);
        EXPECT_TRUE(at::equal(rounded, expected)) << text;
        EXPECT_EQ(rounded.strides(), expected.strides());
        const at::Tensor memory = expected.as_strided({expected.numel()}, {1});
        EXPECT_TRUE(at::equal(codes, pack_codes(memory, format))) << text;
        EXPECT_TRUE(at::equal(at::signbit(unpack_codes(codes, format, dtype)), at::signbit(memory))) << text;
      }
    }
  }
  const at::Tensor nan = at::full({600}, std::numeric_limits<float>::quiet_NaN());
  const auto [rounded, codes] = quantise_and_pack(nan, FPFormat::parse("E4M3-RN"), std::nullopt);
  EXPECT_TRUE(at::isnan(rounded).all().item<bool>());
  EXPECT_FALSE(codes.defined());
}

TEST(PackedCodes, EveryCodeOfEveryFormatIsItsValue) {
  const at::Tensor all = at::arange(256, at::kByte);
  for (const char* text : {"E4M3", "E5M2", "E3M4", "E2M1", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn"}) {
    const FPFormat format = FPFormat::parse(text);
    const at::Tensor codes = all.slice(0, 0, int64_t(1) << format.bits());
    for (auto dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor values = unpack_codes(codes, format, dtype);
      for (int64_t i = 0; i < codes.numel(); ++i) {
        const double expected = decode_one(uint8_t(i), format), got = values[i].item<double>();
        const bool borrowed = i == 1 << (format.bits() - 1);  // NaN, which these formats have not, or negative zero
        if (!borrowed || !std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(expected) ? std::isnan(got) : expected == got) << text << " " << i << " " << got;
        }
      }
    }
  }
}

TEST(PackedCodes, AreNotMadeOfANaNThatTheFormatHasNot) {
  const at::Tensor x = at::full({100}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(pack_codes(x, FPFormat::parse("E4M3")).defined());
  EXPECT_FALSE(pack_codes(x, FPFormat::parse("e2m1fn")).defined());
  EXPECT_TRUE(at::isnan(unpack_codes(pack_codes(x, FPFormat::parse("e4m3fn")), FPFormat::parse("e4m3fn"), at::kFloat))
                  .all()
                  .item<bool>());
}

TEST(Codes, RefuseWithAWord) {
  EXPECT_THROW(encode(at::randn({3}), FPFormat::parse("fp16")), Error);
  EXPECT_THROW(decode(at::empty({3}, at::kByte), FPFormat::parse("bf16")), Error);
  EXPECT_THROW(decode(at::randn({3}), FPFormat::parse("E4M3")), Error);
  EXPECT_THROW(decode(at::empty({3}, at::kByte), FPFormat::parse("E4M3"), at::kInt), Error);
  EXPECT_THROW(encode(at::arange(3), FPFormat::parse("E4M3")), Error);
}

}  // namespace
}  // namespace plumb
