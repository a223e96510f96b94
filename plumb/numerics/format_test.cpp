#include "plumb/numerics/format.h"

#include <gtest/gtest.h>

#include "plumb/core/error.h"

namespace plumb {
namespace {

TEST(Format, PlainFamilySpendsEveryCodeOnANumber) {
  FPFormat f(4, 3);
  EXPECT_EQ(f.bits(), 8);
  EXPECT_EQ(f.max_absolute_value(), 240);
  EXPECT_EQ(f.min_absolute_normal(), 0x1p-7);
  EXPECT_EQ(f.min_absolute_subnormal(), 0x1p-10);
  FPFormat g(2, 1);
  EXPECT_EQ(g.max_absolute_value(), 3);
  EXPECT_EQ(g.min_absolute_normal(), 0.5);
  EXPECT_EQ(g.min_absolute_subnormal(), 0.25);
  EXPECT_EQ(FPFormat(5, 2).max_absolute_value(), 57344);
  EXPECT_EQ(FPFormat(3, 0).max_absolute_value(), 8);
}

TEST(Format, StandardOnesHaveThePublishedRanges) {
  auto range = [](const char* name) {
    FPFormat f = FPFormat::parse(name);
    return std::tuple(f.max_absolute_value(), f.min_absolute_normal(), f.min_absolute_subnormal());
  };
  EXPECT_EQ(range("e4m3fn"), std::tuple(448.0, 0x1p-6, 0x1p-9));
  EXPECT_EQ(range("e5m2"), std::tuple(57344.0, 0x1p-14, 0x1p-16));
  EXPECT_EQ(range("e4m3fnuz"), std::tuple(240.0, 0x1p-7, 0x1p-10));
  EXPECT_EQ(range("e5m2fnuz"), std::tuple(57344.0, 0x1p-15, 0x1p-17));
  EXPECT_EQ(range("fp16"), std::tuple(65504.0, 0x1p-14, 0x1p-24));
  EXPECT_EQ(range("bf16"), std::tuple(0x1.fep127, 0x1p-126, 0x1p-133));
  EXPECT_EQ(range("tf32"), std::tuple(0x1.ffcp127, 0x1p-126, 0x1p-136));
  EXPECT_EQ(range("e2m1fn"), std::tuple(6.0, 1.0, 0.5));
  EXPECT_EQ(range("e2m3fn"), std::tuple(7.5, 1.0, 0.125));
  EXPECT_EQ(range("e3m2fn"), std::tuple(28.0, 0.25, 0.0625));
}

TEST(Format, TextRoundTrips) {
  for (const char* text : {"E4M3-SR", "E4M3-SR8", "E5M2-RN", "E2M1-RZ", "E3M0-SR", "e4m3fn-RN", "e4m3fn-RN-inf",
                           "e5m2-SR3", "fp16-RN", "fp16-RZ-sat", "bf16-SR", "tf32-RN", "fp32-RN", "e2m1fn-RN"})
    EXPECT_EQ(FPFormat::parse(text).to_string(), text);
  EXPECT_EQ(FPFormat::parse("E4M3").to_string(), "E4M3-RN");
  EXPECT_EQ(FPFormat(4, 3).to_string(), "E4M3-SR");
  EXPECT_EQ(FPFormat::parse("E4M3-SR20").to_string(), "E4M3-SR");
  for (int e = 2; e <= 8; ++e)
    for (int m = 0; m <= 23; ++m) {
      FPFormat f(e, m, Rounding::Nearest);
      EXPECT_EQ(FPFormat::parse(f.to_string()), f);
    }
}

TEST(Format, StochasticTakesAllRandomBitsUnlessTold) {
  EXPECT_EQ(FPFormat(4, 3).srbits, 20);
  EXPECT_EQ(FPFormat(4, 3, "stochastic", 7).srbits, 7);
  EXPECT_EQ(FPFormat(4, 3, "nearest").srbits, 0);
  EXPECT_EQ(FPFormat(4, 3).with_rounding(Rounding::TowardZero).srbits, 0);
}

TEST(Format, RefusesWhatItCannotBe) {
  for (const char* text : {"",
                           "-",
                           "e4m3",
                           "E4",
                           "M3",
                           "E4M",
                           "EM3",
                           "E1M3",
                           "E9M3",
                           "E4M24",
                           "E4M3-",
                           "E4M3-XX",
                           "E4M3-SR0",
                           "E4M3-SR21",
                           "E4M3-SRx",
                           "E4M3-RN-RN",
                           "E4M3-sat-inf",
                           "E4M3 ",
                           "E-4M3",
                           "E4M3-RN-sat-",
                           "fp8",
                           "E99999999999M3"})
    EXPECT_THROW(FPFormat::parse(text), Error) << text;
  EXPECT_THROW(FPFormat(1, 3), Error);
  EXPECT_THROW(FPFormat(9, 3), Error);
  EXPECT_THROW(FPFormat(4, -1), Error);
  EXPECT_THROW(FPFormat(4, 24), Error);
  EXPECT_THROW(FPFormat(4, 3, "nearest", 3), Error);
  EXPECT_THROW(FPFormat(4, 3, "stochastic", -1), Error);
  EXPECT_THROW(FPFormat(4, 3, "up"), Error);
}

TEST(Format, ErrorsNameTheTextAndTheRemedy) {
  try {
    FPFormat::parse("e4m3");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
    EXPECT_NE(error.message().find("'e4m3'"), std::string::npos);
    for (const char* part : {"e4m3fn", "-RZ", "-sat or -inf"})
      EXPECT_NE(error.remedy().find(part), std::string::npos) << part;
  }
}

}  // namespace
}  // namespace plumb
