#include "plumb/numerics/saved_codes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/numerics/codes.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

using Tensors = std::vector<at::Tensor>;

TEST(SavedCodes, BringBackEveryValueOfAFormatAndItsZerosSigns) {
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

TEST(SavedCodes, MadeWhileRoundingAreThoseMadeAfterwards) {
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

TEST(SavedCodes, EveryCodeOfEveryFormatIsItsValue) {
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

TEST(SavedCodes, AreNotMadeOfANaNThatTheFormatHasNot) {
  const at::Tensor x = at::full({100}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(pack_codes(x, FPFormat::parse("E4M3")).defined());
  EXPECT_FALSE(pack_codes(x, FPFormat::parse("e2m1fn")).defined());
  EXPECT_TRUE(at::isnan(unpack_codes(pack_codes(x, FPFormat::parse("e4m3fn")), FPFormat::parse("e4m3fn"), at::kFloat))
                  .all()
                  .item<bool>());
}

// The product of quantised inputs, and what its node keeps of the first one: true if that is codes.
struct Case {
  const char* name;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> product;
  std::vector<int64_t> left, right;
};

const std::vector<Case> kCases = {
    {"linear", [](const at::Tensor& a, const at::Tensor& b) { return at::linear(a, b); }, {4, 20, 32}, {40, 32}},
    {"addmm",
     [](const at::Tensor& a, const at::Tensor& b) { return at::linear(a, b, at::ones({40})); },
     {4, 20, 32},
     {40, 32}},
    {"matmul", [](const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); }, {4, 20, 32}, {4, 32, 30}},
    {"attention",
     [](const at::Tensor& a, const at::Tensor& b) { return at::scaled_dot_product_attention(a, b, b); },
     {2, 4, 20, 32},
     {2, 4, 20, 32}},
    {"conv", [](const at::Tensor& a, const at::Tensor& b) { return at::conv1d(a, b); }, {4, 8, 64}, {16, 8, 5}},
};

Tensors gradients(const Case& c, const std::string& bwd) {
  at::manual_seed(1);
  at::Tensor a = at::randn(c.left).requires_grad_(), b = at::randn(c.right).requires_grad_();
  at::Tensor qa = ops::simulate_format(a, "E4M3-SR", "none", 5), qb = ops::simulate_format(b, "E4M3-SR", "none", 6);
  at::Tensor y = c.product(qa, qb);
  if (!bwd.empty()) y = ops::simulate_format(y, "none", bwd, 7);
  at::Tensor g = at::randn(y.sizes());
  if (bwd.empty()) g = quantise(g, FPFormat::parse("E5M2-RN"));
  return torch::autograd::grad({y}, {a, b}, {g});
}

TEST(SavedCodes, GradientsOfProductsAreTheSameBits) {
  for (const Case& c : kCases) {
    const Tensors with = gradients(c, "E5M2-RN"), without = gradients(c, "");
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(with[i], without[i])) << c.name;
  }
}

TEST(SavedCodes, LetGoOfTheQuantisedTensor) {
  for (const Case& c : kCases) {
    at::Tensor a = at::randn(c.left).requires_grad_(), b = at::randn(c.right).requires_grad_(), y;
    c10::weak_intrusive_ptr<c10::StorageImpl> memory = [&] {
      const at::Tensor qa = ops::simulate_format(a, "E4M3", "none"), qb = ops::simulate_format(b, "E4M3", "none");
      y = ops::simulate_format(c.product(qa, qb), "none", "E5M2");
      return qa.storage().getWeakStorageImpl();
    }();
    EXPECT_TRUE(memory.expired()) << c.name;
  }
}

TEST(SavedCodes, LeaveAloneWhatWasWrittenSince) {
  // Written before it is saved: no longer values of the format.
  at::manual_seed(1);
  at::Tensor a = at::randn({20, 32}).requires_grad_(), b = at::randn({40, 32}).requires_grad_();
  at::Tensor qa = ops::simulate_format(a, "E4M3", "none");
  qa.add_(0.001);
  at::Tensor y = ops::simulate_format(at::linear(qa, b), "none", "E5M2");
  const at::Tensor g = quantise(at::ones({20, 40}), FPFormat::parse("E5M2"));
  EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {b}, {g})[0], at::mm(g.t(), qa)));
}

TEST(SavedCodes, GradientsOfGradientsArePossible) {
  at::Tensor a = at::randn({20, 32}).requires_grad_(), b = at::randn({40, 32}).requires_grad_();
  at::Tensor y = ops::simulate_format(
      at::linear(ops::simulate_format(a, "E4M3", "none"), ops::simulate_format(b, "E4M3", "none")), "none", "E5M2");
  auto first = torch::autograd::grad({y.sum()}, {a}, {}, std::nullopt, /*create_graph=*/true);
  auto second = torch::autograd::grad({first[0].pow(2).sum()}, {b});
  const at::Tensor qb = quantise(b, FPFormat::parse("E4M3"));
  EXPECT_TRUE(at::allclose(second[0], 2 * 20 * qb.sum(0).expand_as(b), 1e-4, 1e-4));
}

}  // namespace
}  // namespace plumb
