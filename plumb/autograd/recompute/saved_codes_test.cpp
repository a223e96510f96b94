#include "plumb/autograd/recompute/recompute_testing.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/autograd/simulate_format.h"
#include "plumb/numerics/quantise.h"
#include "plumb/operators/dispatch_keys.h"

namespace plumb {
namespace {

using Tensors = std::vector<at::Tensor>;

// The product of quantized inputs, and what its node keeps of the first one: true if that is codes.
struct Product {
  const char* name;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> product;
  std::vector<int64_t> left, right;
};

const std::vector<Product> kProducts = {
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

Tensors gradients(const Product& c, const std::string& bwd) {
  at::manual_seed(1);
  at::Tensor a = at::randn(c.left).requires_grad_(), b = at::randn(c.right).requires_grad_();
  const c10::impl::IncludeDispatchKeyGuard as_in_a_graph(kRecomputeKey);
  at::Tensor qa = ops::simulate_format(a, "E4M3-SR", "none", 5), qb = ops::simulate_format(b, "E4M3-SR", "none", 6);
  at::Tensor y = c.product(qa, qb);
  if (!bwd.empty()) y = ops::simulate_format(y, "none", bwd, 7);
  at::Tensor g = at::randn(y.sizes());
  if (bwd.empty()) g = quantise(g, FPFormat::parse("E5M2-RN"));
  return torch::autograd::grad({y}, {a, b}, {g});
}

TEST(SavedCodes, GradientsOfProductsAreTheSameBits) {
  for (const Product& c : kProducts) {
    const Tensors with = gradients(c, "E5M2-RN"), without = gradients(c, "");
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(with[i], without[i])) << c.name;
  }
}

TEST(SavedCodes, LetGoOfTheQuantisedTensor) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  const c10::impl::IncludeDispatchKeyGuard as_in_a_graph(kRecomputeKey);
  for (const Product& c : kProducts) {
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
  const c10::impl::IncludeDispatchKeyGuard as_in_a_graph(kRecomputeKey);
  at::manual_seed(1);
  at::Tensor a = at::randn({20, 32}).requires_grad_(), b = at::randn({40, 32}).requires_grad_();
  at::Tensor qa = ops::simulate_format(a, "E4M3", "none");
  qa.add_(0.001);
  at::Tensor y = ops::simulate_format(at::linear(qa, b), "none", "E5M2");
  const at::Tensor g = quantise(at::ones({20, 40}), FPFormat::parse("E5M2"));
  EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {b}, {g})[0], at::mm(g.t(), qa)));
}

TEST(SavedCodes, GradientsOfGradientsArePossible) {
  const c10::impl::IncludeDispatchKeyGuard as_in_a_graph(kRecomputeKey);
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
